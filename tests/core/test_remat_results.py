"""What a block of `remat` returns and keeps, beside a plain call of it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlotool import remat
from tests.core.operators.products import distance, forward, reverse

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
@pytest.mark.parametrize("way", [reverse, forward])
def test_results_of_its_own_may_be_changed_in_place(name: str, way: Callable[..., list[Tensor]]) -> None:
    block, given = BLOCKS[name], ([POINT], [torch.ones_like(POINT)])
    expected = way(lambda x: changed(block, x), *given)
    found = way(lambda x: changed(lambda x: remat(block, x), x), *given)
    assert distance(found, expected) < 1e-12


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
