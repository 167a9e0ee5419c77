import pytest
import torch
from torch import nn

from mlotool.core.errors import ConfigError
from mlotool.models import CellNetwork, StrongestEdges, operation

OPERATIONS = (
    *("none", "max_pool_3x3", "avg_pool_3x3", "skip_connect"),
    *("sep_conv_3x3", "sep_conv_5x5", "dil_conv_3x3", "dil_conv_5x5"),
)


@pytest.mark.parametrize("size", [2, 7, 8])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_keep_the_width_and_take_the_stride(name: str, affine: bool, stride: int, size: int) -> None:
    module = operation(name, 4, stride, affine=affine)
    images = torch.randn(3, 4, size, size)
    assert module(images).shape == (3, 4, -(-size // stride), -(-size // stride))
    norms = [each for each in module.modules() if isinstance(each, nn.BatchNorm2d)]
    assert all(each.affine is affine for each in norms)


def test_a_halving_connection_reads_every_pixel() -> None:
    module = operation("skip_connect", 2, 2, affine=False).eval()
    images = torch.rand(1, 2, 4, 4, requires_grad=True)
    module(images).abs().sum().backward()
    # One half reads the pixels with even coordinates, the other those with odd ones, as in the published code.
    read = images.grad.ne(0).any(dim=1)[0]
    assert read.tolist() == [
        [(row + column) % 2 == 0 and row % 2 == column % 2 for column in range(4)] for row in range(4)
    ]


def test_a_cell_has_14_edges_and_the_network_two_reductions() -> None:
    network = CellNetwork([3, 32, 32], 10, width=4, num_cells=8, affine=False)
    assert [number for number, cell in enumerate(network.cells) if hasattr(cell, "reduction")] == [2, 5]
    assert len(network.cells[0].normal) == len(network.cells[2].reduction) == 14
    assert all(not m.affine for m in network.cells.modules() if isinstance(m, nn.BatchNorm2d))


def probabilities(edges: list[list[float]], kind: str = "normal") -> dict[str, torch.Tensor]:
    return {f"{kind}_{number}": torch.tensor(edge).softmax(0) for number, edge in enumerate(edges)}


def test_the_strongest_edges_are_kept_and_none_never_is() -> None:
    logits = torch.zeros(5, 8)  # node 2 reads 0 and 1; node 3 reads 0, 1 and 2
    logits[0, 4], logits[1, 0], logits[1, 3] = 2.0, 9.0, 1.0
    logits[2, 0], logits[3, 1], logits[4, 7] = 9.0, 1.0, 2.0
    given = probabilities(logits.tolist()) | probabilities(logits[:2].tolist(), "reduction")
    found = StrongestEdges()(dict.fromkeys(given, OPERATIONS), given)
    assert list(found.values()) == [
        *("sep_conv_3x3", "skip_connect"),
        *("none", "max_pool_3x3", "dil_conv_5x5"),
        *("sep_conv_3x3", "skip_connect"),
    ]
    assert list(found) == list(given)


def test_edges_of_no_cell_are_refused() -> None:
    given = probabilities([[0.0, 1.0]] * 4)
    with pytest.raises(ConfigError, match=r"found 4 decisions 'normal_0', .* expected one for each edge of a cell"):
        StrongestEdges()(dict.fromkeys(given, ("none", "skip")), given)
    given = probabilities([[0.0, 1.0]] * 2)
    with pytest.raises(ConfigError, match=r"rule\.none: found 'nothing', which is no candidate of 'normal_0'"):
        StrongestEdges(none="nothing")(dict.fromkeys(given, ("none", "skip")), given)
