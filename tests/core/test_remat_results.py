"""What a block of `remat` returns and keeps, beside a plain call of it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlotool import remat
from mlotool.hypergradient.products.forward import moving_gradient

POINT = torch.randn(2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def twice(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    return y, y


BLOCKS: dict[str, Callable[[Tensor], Any]] = {
    "a view of its own": lambda x: ((x * 2).view(-1),),
    "a transposed one": lambda x: ((x.sin() * 2).t(),),
    "one tensor twice": twice,
    "with an index": lambda x: (x * 2, x.argmax(1)),
    "a view and a view of an input": lambda x: ((x * 2).view(-1), x.view(-1)),
}


def changed(call: Callable[[Tensor], Any], x: Tensor) -> Tensor:
    """Change the first result in place, and return a number of all."""
    point = x * 1.0
    results = call(point)
    results[0].mul_(3.0)
    found: Tensor = torch.stack([(each.double() ** 3).sum() for each in (*results, point)]).sum()
    return found


@pytest.mark.parametrize("name", BLOCKS)
def test_results_of_its_own_may_be_changed_in_place(name: str) -> None:
    def twice_differentiated(call: Callable[[Tensor], Any]) -> list[Tensor]:
        x = POINT.clone().requires_grad_()
        [slope] = torch.autograd.grad(changed(call, x), [x], create_graph=True)
        return [slope, *torch.autograd.grad(slope.square().sum(), [x])]

    block = BLOCKS[name]
    expected, found = twice_differentiated(block), twice_differentiated(lambda x: remat(block, x))
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", BLOCKS)
def test_likewise_by_forward_mode(name: str) -> None:
    block = BLOCKS[name]
    given = [POINT], [torch.ones_like(POINT)], [True]
    expected = moving_gradient(lambda points: changed(block, points[0]), *given)
    found = moving_gradient(lambda points: changed(lambda x: remat(block, x), points[0]), *given)
    for (a,), (b,) in zip(found, expected, strict=True):
        assert a is not None
        assert b is not None
        assert torch.allclose(a, b, rtol=1e-12)


@pytest.mark.parametrize("block", [lambda x: x.view(-1), lambda x: x, lambda x: x[:, :2]])
def test_a_change_that_would_have_to_reach_an_input_is_refused(block: Callable[[Tensor], Tensor]) -> None:
    x = POINT.clone().requires_grad_() * 1.0
    with pytest.raises(RuntimeError, match="modified inplace"):
        remat(block, x).mul_(2.0)


def test_a_buffer_that_is_assigned_brings_no_graph_along() -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            self.mean = 0.5 * self.mean + x.detach().mean(0)
            return x - self.mean

    block = Mean()
    remat(block, POINT.clone().requires_grad_())
    assert not block.mean.requires_grad
    assert torch.allclose(block.mean, POINT.mean(0))
