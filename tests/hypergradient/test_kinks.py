"""Products with H by finite differences over kinks, and past the parameters, are told with their reason."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mlotool.hypergradient import (
    AbstractSolver,
    ConjugateGradient,
    Exact,
    FixedPoint,
    Implicit,
    Neumann,
    NormalEquationConjugateGradient,
)
from mlotool.program import Graph, Problem, Program
from tests.programs import Point

SIZE = 6
KINKS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "leaky_relu": functional.leaky_relu,
    "abs": torch.abs,
    "clamp": lambda x: x.clamp(-3.0, 0.0),
    "hinge": lambda x: (-x).clamp_min(0.0),
    "maximum": lambda x: torch.maximum(x, 2 * x),
    "max_pool": lambda x: functional.max_pool1d(torch.stack([x, -x], 1)[None].flatten(1), 2)[0],
    "l1_loss": lambda x: functional.l1_loss(x, torch.zeros_like(x), reduction="none"),
    "hardtanh": lambda x: functional.hardtanh(x, 0.0, 4.0),
    "sort": lambda x: torch.stack([x, torch.zeros_like(x)], 1).sort(1).values[:, 1],
}
SMOOTH: dict[str, Callable[[Tensor], Tensor]] = {
    "softplus": functional.softplus,
    "tanh": torch.tanh,
    "square": torch.square,
    "huber": lambda x: functional.huber_loss(x, torch.zeros_like(x), reduction="none"),
    "exp": torch.exp,
}
SOLVERS: dict[str, AbstractSolver] = {
    "neumann": Neumann(2, 0.1),
    "fixed_point": FixedPoint(3, 0.1),
    "cg": ConjugateGradient(6, 1e-6),
    "normal_cg": NormalEquationConjugateGradient(6, 1e-6),
    "exact": Exact(),
}
RADIUS = {torch.float64: 3.6e-5, torch.float32: 3e-2}
"""By default, of parameters of root mean square 1."""


def program(
    function: Callable[[Tensor], Tensor],
    solver: AbstractSolver,
    distance: float,
    dtype: torch.dtype,
    sign: float = 1.0,
    product: Any = "finite_difference",
    **settings: Any,
) -> Program:
    """Let theta, near 1, be as far from the place of the kinks as is said: a share of the radius."""
    at = 1.0 + distance * RADIUS[dtype] / SIZE**0.5

    def lower(batch: None, *, w: Any, lam: Any) -> Tensor:
        return sign * function(w() - 1.0).sum() + (w() ** 2).sum() - (lam() * w()).sum()

    algorithm = Implicit(solver, product, **settings)
    low = Problem(
        "w", Point(torch.full((SIZE,), at, dtype=dtype)), lower, roles={"w": "w", "lam": "lam"}, hypergradient=algorithm
    )
    upper = Problem("lam", Point(torch.zeros(SIZE, dtype=dtype)), lambda batch, *, w: w().sum(), roles={"w": "w"})
    return Program([low, upper], Graph({"lam": ["w"]}, {"w": ["lam"]}))


@pytest.mark.parametrize("dtype", RADIUS)
@pytest.mark.parametrize("distance", [0.0, 0.1, 0.6])
@pytest.mark.parametrize("name", KINKS)
def test_a_kink_within_the_radius_is_told(name: str, distance: float, dtype: torch.dtype) -> None:
    """Exactly there, within a quarter of the radius, and within the radius alone."""
    built = program(KINKS[name], SOLVERS["neumann"], distance, dtype)
    with pytest.warns(UserWarning, match=r"problems\.w: .*jumps within the radius.*product: reverse") as caught:
        built.gradient("lam")
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        built.gradient("lam")
        # Away from the kink H is 2: q = 0.1 (1 + 0.8) in the direction of v.
        if distance:
            exact = program(KINKS[name], SOLVERS["neumann"], distance, dtype, product="reverse").gradient("lam")["x"]
            torch.testing.assert_close(exact, torch.full((SIZE,), 0.18, dtype=dtype))


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("name", SOLVERS)
def test_the_curvature_is_not_blamed(name: str, sign: float) -> None:
    built = program(torch.abs, SOLVERS[name], 0.1, torch.float64, sign)
    with pytest.warns(UserWarning, match="jumps within the radius") as caught:
        built.gradient("lam")
    assert not [str(each.message) for each in caught if "ended with" in str(each.message)]


@pytest.mark.parametrize("dtype", RADIUS)
@pytest.mark.parametrize("function", [*SMOOTH.values(), *KINKS.values()], ids=[*SMOOTH, *KINKS])
def test_nothing_is_said_of_what_is_smooth_within_the_radius(function: Any, dtype: torch.dtype) -> None:
    distance = 0.1 if function in SMOOTH.values() else 1.5 * SIZE**0.5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("neumann", "cg"):
            found = program(function, SOLVERS[name], distance, dtype).gradient("lam")["x"]
            exact = program(function, SOLVERS[name], distance, dtype, product="reverse").gradient("lam")["x"]
            assert float((found - exact).norm() / exact.norm()) < 1e-2


def test_a_later_solve_that_breaks_down_is_judged_as_well() -> None:
    built = program(lambda x: -4 * torch.abs(x), SOLVERS["cg"], 10.0, torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            built.gradient("lam")
    with torch.no_grad():
        built.problems["w"].module.x.fill_(1.0 + 1e-6)
    with pytest.warns(UserWarning, match="jumps within the radius"):
        built.gradient("lam")


PAST: dict[str, Callable[[Tensor], Tensor]] = {
    "quartic": lambda x: x**4,
    "sine": torch.sin,
    "logistic": lambda x: 8 * functional.softplus(x),
    "cosine": lambda x: torch.cos(x),
    "rational": lambda x: 1 / (1 + x**2),
}


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float32, 1e-6), (torch.float32, 1e-7), (torch.float64, 1e-12)])
@pytest.mark.parametrize("name", PAST)
def test_a_radius_past_the_parameters_is_told(name: str, dtype: torch.dtype, scale: float) -> None:
    """The floor of the default radius; the cross product is exact all the same."""

    def lower(batch: None, *, w: Any, lam: Any) -> Tensor:
        return scale**2 * PAST[name](w() / scale).sum() + (w() ** 2).sum() - (lam() * w()).sum()

    theta = scale * torch.linspace(0.5, 1.5, SIZE, dtype=dtype)
    algorithm = Implicit(Neumann(2, 0.1), "finite_difference")
    low = Problem("w", Point(theta), lower, roles={"w": "w", "lam": "lam"}, hypergradient=algorithm)
    upper = Problem("lam", Point(torch.zeros(SIZE, dtype=dtype)), lambda batch, *, w: w().sum(), roles={"w": "w"})
    built = Program([low, upper], Graph({"lam": ["w"]}, {"w": ["lam"]}))
    with pytest.warns(UserWarning, match=r"times the norm of the parameters") as caught:
        built.gradient("lam")
    assert len(caught) == 1
