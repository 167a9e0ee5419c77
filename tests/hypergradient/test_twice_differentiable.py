"""Functions that are differentiable once are refused where a second derivative would be taken of them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor

from mlotool.core.errors import ConfigError
from mlotool.hypergradient import Exact, Implicit, Neumann, Penalty, Unrolled
from mlotool.program import AbstractHypergradient, Program
from tests.hypergradient.two_levels import two_levels
from tests.program.small import numbers
from tests.programs import Point

MATCH = r"problems\.w\.loss: found Cube, .* once_differentiable.*expected functions that .* twice.*finite_difference"


class Cube(torch.autograd.Function):
    """`x^3`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * cotangent


def program(
    make: Callable[[], AbstractHypergradient], cube: Callable[[Tensor], Tensor] = Cube.apply, is_hidden: bool = True
) -> Program:
    """Return the program; hidden, the cotangent of the cube is a constant, so that torch itself says nothing."""

    def fit(batch: None, *, w: Any, u: Any) -> Tensor:
        cubes = cube(w())
        return (cubes.sum() if is_hidden else (cubes**2).sum()) + ((w() - u()) ** 2).sum()

    upper = Point(numbers(0.2, -0.4)), lambda _, *, w: (w() ** 2).sum()
    optimizer = partial(torch.optim.SGD, lr=0.1)
    return two_levels((Point(numbers(0.5, 1.0)), fit), upper, make(), optimizer=optimizer, unroll_steps=2)


@pytest.mark.parametrize("is_hidden", [True, False])
@pytest.mark.parametrize(
    "make",
    [lambda: Implicit(Exact()), lambda: Implicit(Neumann(3, 0.01)), Unrolled, lambda: Unrolled(remat=False)],
    ids=["exact", "neumann", "unrolled", "connected"],
)
def test_a_second_derivative_is_refused(make: Callable[[], AbstractHypergradient], is_hidden: bool) -> None:
    with pytest.raises(ConfigError, match=MATCH):
        program(make, is_hidden=is_hidden).gradient("u")
    assert program(make, lambda x: x**3, is_hidden).gradient("u")["x"].norm() > 0


def test_what_takes_first_derivatives_alone_works_as_with_the_plain_function() -> None:
    for make in (
        lambda: Implicit(Exact(), product="finite_difference"),
        lambda: Unrolled(second_order=False),
        lambda: Penalty(multiplier=20.0, num_steps=2, step_size=0.1),
    ):
        found, expected = (program(make, cube).gradient("u")["x"] for cube in (Cube.apply, lambda x: x**3))
        assert torch.allclose(found, expected, rtol=1e-6)
    exact = program(lambda: Implicit(Exact()), lambda x: x**3).gradient("u")["x"]
    by_differences = program(lambda: Implicit(Exact(), product="finite_difference")).gradient("u")["x"]
    assert torch.allclose(by_differences, exact, rtol=1e-6)
