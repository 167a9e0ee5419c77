"""A flat graph has no operations that change nothing."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from mlotool.program.flat_graph import simplified


@pytest.mark.parametrize(
    ("function", "num_views"),
    [
        (lambda x: x.sum((0,), keepdim=True).view(5, 3), 0),
        (lambda x: x.sum((0, -1), keepdim=True).view(5), 0),
        # Another shape than the one without the axes that were summed.
        (lambda x: x.sum((0,), keepdim=True).view(15), 1),
        (lambda x: x.sum((0,), keepdim=True).view(3, 5), 1),
        # Somebody else wants the axes.
        (lambda x: (s := x.sum((0,), keepdim=True)).view(5, 3) + (x + s)[0], 1),
    ],
)
def test_a_sum_drops_the_axes_that_a_view_leaves_out(function: Callable[[Tensor], Tensor], num_views: int) -> None:
    argument = torch.randn(4, 5, 3)
    module = simplified(make_fx(function)(argument))
    module.graph.lint()
    assert torch.equal(module(argument), function(argument))
    assert sum(node.target is torch.ops.aten.view.default for node in module.graph.nodes) == num_views
