"""Large buffers are copied where they are written to, and nowhere else."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mlotool import remat
from mlotool.core.bound_module import lazy_copy
from tests.live_storage import LiveStorage

SIZE = 128
POINT = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Masked(nn.Module):
    """Reads a large buffer, and adds one to it where it `is_moved`."""

    def __init__(self, is_moved: bool = False) -> None:
        super().__init__()
        self.scale, self.is_moved = nn.Parameter(torch.tensor(1.5, dtype=torch.float64)), is_moved
        self.register_buffer("mask", torch.full((SIZE, SIZE), float("-inf"), dtype=torch.float64).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        y = (self.scale * x + self.mask).softmax(-1) @ x
        if self.is_moved:
            self.mask += 1.0
        return y


CHANGES: list[Callable[[Tensor], object]] = [
    lambda x: x.fill_(2.0),
    lambda x: x.numpy().fill(2.0),
    # By a kernel that counts no version.
    lambda x: F.batch_norm(torch.randn(4, x.numel()), x.view(-1), x.view(-1).clone(), training=True),
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("is_copy", [True, False])
def test_what_changes_one_leaves_the_other(change: Callable[[Tensor], object], is_copy: bool) -> None:
    value = torch.zeros(SIZE, SIZE)
    copy = lazy_copy(value)
    changed, left = (copy, value) if is_copy else (value, copy)
    change(changed)
    assert bool(changed.any())
    assert not bool(left.any())


def slopes(call: Callable[[Tensor], Tensor], block: Masked, between: Callable[[], object]) -> list[Tensor]:
    """Return a gradient and a derivative of it, where something happens after the forward pass."""
    x = POINT.clone().requires_grad_()
    y = call(x).square().sum()
    between()
    first = torch.autograd.grad(y, [x, block.scale], create_graph=True)
    return [*first, *torch.autograd.grad(first[1], [x, block.scale])]


@pytest.mark.parametrize("is_moved", [False, True])
def test_a_block_is_evaluated_again_with_the_buffer_that_it_had(is_moved: bool) -> None:
    plain, block = Masked(is_moved), Masked(is_moved)
    expected = slopes(lambda x: plain(x) + plain(x), plain, lambda: None)
    found = slopes(lambda x: remat(block, x) + remat(block, x), block, lambda: block.mask.fill_(3.0))
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(found, expected, strict=True))
    assert torch.equal(block.mask, torch.full_like(block.mask, 3.0))


def test_masks_of_blocks_are_held_once() -> None:
    class Row(Masked):
        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale + self.mask[:, :1]

    rows, x = [Row() for _ in range(8)], POINT[:, :1].clone().requires_grad_()
    with LiveStorage() as live:
        y = x
        for row in rows:
            y = remat(row, y)
        held = live.now
    assert held < SIZE * SIZE * 8
    torch.autograd.grad(y.sum(), x)
