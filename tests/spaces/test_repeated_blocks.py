"""Copies of blocks are what the block is: in what it stretches, in its calls, in its mode."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlotool.core.errors import InfeasibleModelError
from mlotool.spaces import Repeat, Space


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gate = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return F.dropout(h * torch.sigmoid(self.gate(h)), 0.5, self.training)


class Net(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)  # type: ignore[no-any-return]


def test_a_block_that_stretches_is_repeated() -> None:
    space = Space(lambda: Net(Gate()), [Repeat("depth", "block", [3])], inputs=[4]).eval()
    x = torch.randn(2, 4)
    expected = x
    for path in ("block", "depth_0_1.block", "depth_0_2.block"):
        h = space.get_submodule(f"{path}.layer")(expected)
        expected = h * torch.sigmoid(space.get_submodule(f"{path}.gate")(h))
    assert torch.equal(space(x), expected)


def test_a_copy_is_a_block_that_is_called_once() -> None:
    again = Repeat("again", "depth_0_1.block", [2])
    space = Space(lambda: Net(Gate()), [Repeat("depth", "block", [2]), again], inputs=[4])
    calls = [node.id for node in space.nodes if node.id.endswith(":dropout")]
    assert calls == ["block:dropout", "depth_0_1.block:dropout", "again_0_1.depth_0_1.block:dropout"]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.pretraining = nn.Linear(4, 4), nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.mm(self.layer(x), self.pretraining)


def test_a_parameter_is_no_mode_whatever_its_name_ends_with() -> None:
    with pytest.raises(InfeasibleModelError, match=r"holds 'block\.pretraining'"):
        Space(lambda: Net(Scaled()), [Repeat("depth", "block", [2])], inputs=[4])
