"""Functions that are differentiable once are refused where a second derivative would be taken of them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from mlotool import remat
from mlotool.core.errors import ConfigError
from mlotool.hypergradient import Exact, Implicit, Neumann, Penalty, Unrolled
from mlotool.hypergradient.products import ReverseProduct
from mlotool.problem.interface import LowerProblem, LowerView, Vector
from mlotool.program import AbstractHypergradient, Graph, Problem, Program, Schedule
from tests import programs
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

    optimizer = partial(torch.optim.SGD, lr=0.1)
    return Program(
        [
            Problem("w", Point(numbers(0.5, 1.0)), fit, roles={"w": "w", "u": "u"}, optimizer=optimizer,
                    unroll_steps=2, hypergradient=make()),
            Problem("u", Point(numbers(0.2, -0.4)), lambda _, *, w: (w() ** 2).sum(), roles={"w": "w"}),
        ],
        Graph({"u": ["w"]}, {"w": ["u"]}),
    )  # fmt: skip


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


@pytest.mark.parametrize("depth", [1, 2])
def test_it_is_found_in_blocks_that_are_evaluated_again(depth: int) -> None:
    cube: Callable[[Tensor], Tensor] = Cube.apply
    plain: Callable[[Tensor], Tensor] = lambda x: x**3  # noqa: E731 - a function like the other
    for _ in range(depth):
        cube, plain = partial(remat, cube), partial(remat, plain)
    with pytest.raises(ConfigError, match=MATCH):
        program(lambda: Implicit(Exact()), cube).gradient("u")
    assert program(lambda: Implicit(Exact()), plain).gradient("u")["x"].norm() > 0


def test_a_derivative_of_a_pullback_is_refused() -> None:
    case = programs.nested()
    built = case.program(lambda: Implicit(Exact()))
    built.problems["low"].loss = lambda batch, *, low, mid, top: Cube.apply(low()).sum() + (low() * mid()).sum()
    with pytest.raises(ConfigError, match=MATCH.replace("w", "low", 1)):
        built.gradient("top")


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


@pytest.mark.parametrize("is_remat", [False, True])
@pytest.mark.parametrize("name", ["attention", "weight_norm"])
def test_operators_that_fail_in_double_backward_are_replaced(name: str, is_remat: bool) -> None:
    """Fused attention has no second derivative; weight normalization has a wrong one, without a word."""

    def block(x: Tensor, w: Tensor) -> Tensor:
        if name == "weight_norm":
            return x @ torch._weight_norm(w, w[:, :1].square(), 0)
        return nn.functional.scaled_dot_product_attention(*(each[None, None] for each in (x, x @ w, x @ w)))[0, 0]

    def loss(theta: Vector, inputs: Vector) -> Tensor:
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        noise = 1 + 0.1 * torch.rand(3, 4, dtype=torch.float64)
        found = remat(block, x, theta[0]) if is_remat else block(x, theta[0])
        return (noise * found * inputs[0]).pow(2).sum()

    generator = torch.Generator().manual_seed(0)
    theta = [torch.randn(4, 4, generator=generator, dtype=torch.float64)]
    vector = torch.randn(4, 4, generator=generator, dtype=torch.float64)
    inputs = [torch.ones((), dtype=torch.float64)]

    def slope(sign: float) -> Tensor:
        torch.manual_seed(2)
        at = (theta[0] + sign * 1e-5 * vector).requires_grad_()
        return torch.autograd.grad(loss([at], inputs), at)[0]

    expected = (slope(1.0) - slope(-1.0)) / 2e-5
    view = LowerView(LowerProblem("w"), tuple(theta), loss)
    for _ in range(2):
        torch.manual_seed(2)
        product = ReverseProduct(view, theta, inputs, [True])
        assert torch.allclose(product.hessian([vector])[0], expected, rtol=1e-6, atol=1e-8)
    assert view.problem.traits.replaces_operators


class Net(nn.Module):
    """A linear layer with normalized weights, batch normalization, and fused attention."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4, dtype=torch.float64))
        self.norm = nn.BatchNorm1d(4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.linear(x)) * (1 + 0.1 * torch.rand(3, 4, dtype=torch.float64))
        return nn.functional.scaled_dot_product_attention(x[None], y[None], y[None])[0]


def steps(hypergradient: AbstractHypergradient, own_loss: Callable[[Tensor, Tensor], Tensor]) -> Program:
    """Return a program whose lower problem trains a `Net` on `own_loss(output, u)`, after its first two ticks."""
    torch.manual_seed(0)
    x = torch.randn(3, 4, dtype=torch.float64)
    lower = Problem(
        "w", Net(), lambda _, *, w, u: own_loss(w(x), u()), roles={"w": "w", "u": "u"},
        optimizer=partial(torch.optim.SGD, lr=0.1), unroll_steps=2, hypergradient=hypergradient,
    )  # fmt: skip
    upper = Problem(
        "u", Point(numbers(0.2, -0.4, 0.3, 0.1)), lambda _, *, w: (w(x) ** 2).sum(), roles={"w": "w"},
        optimizer=partial(torch.optim.SGD, lr=1.0),
    )  # fmt: skip
    built = Program([upper, lower], Graph({"u": ["w"]}, {"w": ["u"]}))
    schedule = Schedule(built)
    for _ in range(2):
        schedule.tick()
    return built


def test_what_is_differentiable_once_is_refused_in_graphs_that_are_kept() -> None:
    with pytest.raises(ConfigError, match=MATCH):
        steps(Unrolled(remat=False), lambda y, u: Cube.apply(y).sum() + ((y - u) ** 2).sum())


def ctc(y: Tensor, u: Tensor) -> Tensor:
    found = nn.functional.ctc_loss((y * u).log_softmax(1)[:, None], torch.tensor([[1]]), (3,), (1,))
    assert isinstance(found, Tensor)
    return found


@pytest.mark.parametrize(
    "make",
    [Unrolled, lambda: Unrolled(remat=False), lambda: Implicit(Neumann(2, 0.01))],
    ids=["again", "kept", "solver"],
)
def test_an_operator_without_a_second_derivative_is_named(make: Callable[[], AbstractHypergradient]) -> None:
    match = r"problems\.w\.loss: found .*_ctc_loss_backward.* product: reverse; .*twice\. Write hypergradient: finite_d"
    with pytest.raises(ConfigError, match=match):
        steps(make(), ctc)
