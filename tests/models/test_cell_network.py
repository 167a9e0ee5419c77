from typing import Any

import pytest
import torch
from torch import nn

from mlotool.core import BoundModule
from mlotool.core.errors import ConfigError
from mlotool.models import CellArchitecture, CellNetwork, SearchNetwork
from mlotool.models.cell_operations import OPERATIONS, operation
from mlotool.models.genotype import as_text, checked_genotype, num_edges, random_edges, strongest_edges

CELL = [["sep_conv_3x3", 0], ["dil_conv_5x5", 1], ["max_pool_3x3", 2], ["skip_connect", 0]]


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


def test_a_search_cell_has_14_edges_and_the_network_two_reductions() -> None:
    assert num_edges(4) == 14
    network = SearchNetwork([3, 32, 32], 10, width=4, num_cells=8)
    assert [number for number, kind in enumerate(network.stack.kinds) if kind == "reduction"] == [2, 5]
    assert len(network.stack.cells[0].edges) == 14
    assert all(not m.affine for m in network.stack.cells.modules() if isinstance(m, nn.BatchNorm2d))


def test_the_published_network_has_the_published_size() -> None:
    # Liu et al.'s search network on CIFAR-10: 8 cells of width 16.
    num_parameters = sum(p.numel() for p in SearchNetwork([3, 32, 32], 10).parameters())
    assert round(num_parameters / 1e6, 2) == 1.93


def test_the_architecture_decides_what_is_computed() -> None:
    torch.manual_seed(0)
    network = SearchNetwork([1, 8, 8], 3, width=2, num_cells=3, num_nodes=1).eval()
    images, none = torch.randn(2, 1, 8, 8), torch.zeros(2, 8)
    none[:, 0] = 60.0
    logits = network(images, none, none)
    torch.testing.assert_close(logits, network.stack.classifier.bias.expand(2, 3))


def test_a_search_network_runs_under_autocast() -> None:
    torch.manual_seed(0)
    network, logits = SearchNetwork([1, 8, 8], 3, width=2, num_cells=3, num_nodes=1), 0.1 * torch.randn(2, 8)
    images = torch.randn(4, 1, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        reduced = network(images, logits, logits)
    torch.testing.assert_close(reduced.float(), network(images, logits, logits), rtol=0.1, atol=0.1)


def test_evaluation_takes_the_architecture_of_the_last_training_step() -> None:
    network, architecture = SearchNetwork([1, 8, 8], 3, width=2, num_cells=3, num_nodes=1), CellArchitecture(1, 1.0)
    images = torch.randn(4, 1, 8, 8)
    network(images, *architecture())
    torch.testing.assert_close(network.last_normal, architecture.normal.detach())
    network.eval()
    torch.testing.assert_close(network(images), network(images, *architecture()))
    assert not torch.equal(network(images), network(images, torch.zeros(2, 8), torch.zeros(2, 8)))


def test_a_bound_network_leaves_statistics_and_architecture_alone() -> None:
    network, architecture = SearchNetwork([1, 8, 8], 3, width=2, num_cells=3, num_nodes=1), CellArchitecture(1, 1.0)
    before = {name: buffer.clone() for name, buffer in network.named_buffers()}
    BoundModule(network, dict(network.named_parameters()))(torch.randn(4, 1, 8, 8), *architecture())
    for name, buffer in network.named_buffers():
        assert torch.equal(buffer, before[name]), name


def test_the_strongest_edges_are_kept_and_none_never_is() -> None:
    logits = torch.zeros(5, 8)  # node 2 reads 0 and 1; node 3 reads 0, 1 and 2
    logits[0, 4], logits[1, 0], logits[1, 3] = 2.0, 9.0, 1.0
    logits[2, 0], logits[3, 1], logits[4, 7] = 9.0, 1.0, 2.0
    assert strongest_edges(logits) == [
        ("sep_conv_3x3", 0),
        ("skip_connect", 1),
        ("max_pool_3x3", 1),
        ("dil_conv_5x5", 2),
    ]


def test_a_search_s_genotype_is_what_the_network_takes() -> None:
    from yaml import safe_load

    genotype = safe_load(CellArchitecture().genotype())
    network = CellNetwork([1, 8, 8], 10, genotype, width=2)
    assert as_text(network.genotype) == CellArchitecture.genotype(_Fixed(genotype))  # type: ignore[arg-type]
    assert network(torch.randn(2, 1, 8, 8)).shape == (2, 10)


class _Fixed:
    """An architecture whose strongest edges are a given genotype's."""

    def __init__(self, genotype: dict[str, list[list[Any]]]) -> None:
        self.logits = []
        for kind in ("normal", "reduction"):
            logits = torch.zeros(14, 8)
            for number, (name, source) in enumerate(genotype[kind]):
                node = number // 2
                logits[num_edges(node) + source, OPERATIONS.index(name)] = 5.0
            self.logits.append(logits)

    def __call__(self) -> list[torch.Tensor]:
        return self.logits


def test_random_genotypes_come_from_the_seed() -> None:
    def drawn(seed: int) -> dict[str, list[tuple[str, int]]]:
        torch.manual_seed(seed)
        return CellNetwork([1, 8, 8], 10, "random", width=2).genotype

    assert drawn(0) == drawn(0) != drawn(1)
    edges = random_edges(4)
    assert all(edges[2 * node][1] != edges[2 * node + 1][1] for node in range(4))
    assert checked_genotype({"normal": edges, "reduction": edges})["normal"] == edges
    assert all(name != "none" for name, _ in edges)


@pytest.mark.parametrize(
    ("genotype", "message"),
    [
        ("best", "found the text 'best'"),
        ({"normal": CELL}, r"found \['normal'\]; expected `random`, or both cells"),
        ({"normal": CELL, "reduction": CELL[:3]}, r"found 4 \(normal\), 3 \(reduction\) edges"),
        ({"normal": [["sep_conv3x3", 0], *CELL[1:]], "reduction": CELL}, "Did you mean 'sep_conv_3x3'"),
        ({"normal": [["sep_conv_3x3", 2], *CELL[1:]], "reduction": CELL}, "found the node 2; expected 0 to 1"),
        ({"normal": [["sep_conv_3x3"], *CELL[1:]], "reduction": CELL}, "expected an operation and a node"),
    ],
)
def test_what_is_no_genotype_is_refused(genotype: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CellNetwork([1, 8, 8], 10, genotype, width=2)
