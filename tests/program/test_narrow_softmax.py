"""Softmax over a few classes, as a trace computes it, is torch's own."""

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from mlotool.program.decompositions import NARROW_SOFTMAX


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("operation", [torch.softmax, torch.log_softmax])
@pytest.mark.parametrize(
    ("shape", "dim", "is_taken"),
    [
        ((32, 100, 3), -1, True),
        ((2000, 7), 1, True),
        # Few numbers, many classes, another dimension.
        ((10, 3), -1, False),
        ((100, 100), -1, False),
        ((7, 2000), 0, False),
    ],
)
def test_values_and_gradients(
    operation: torch._C._FunctionBase, dtype: torch.dtype, shape: tuple[int, ...], dim: int, is_taken: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = 5 * torch.randn(shape, generator=generator, dtype=dtype)
    x.view(-1)[:3] = torch.tensor([-torch.inf, 100.0, -100.0])
    weight = torch.randn(shape, generator=generator, dtype=dtype)

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        output = operation(x, dim)  # type: ignore[operator]
        return output.detach(), torch.autograd.grad(output, x, weight)[0]

    graph = make_fx(function, NARROW_SOFTMAX)(x)
    assert ("movedim" in graph.code or "permute" in graph.code) == is_taken
    for found, expected in zip(graph(x), function(x), strict=True):
        assert found.stride() == expected.stride()
        tolerance = 1e-14 if dtype == torch.float64 else 1e-6
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
