"""Penalty hypergradients against the implicit one, and against the papers' updates written out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mlotool.hypergradient import Penalty
from mlotool.program import Graph, Problem, Program
from tests.program.small import assert_identical, assert_resumes, pair, upper_loss
from tests.program.test_reduce import BILEVEL, TRILEVEL, batches, two_ranks
from tests.program.test_reduce import program as ranked
from tests.programs import Case, bilevel, diamond, trilevel, two_path

CASES = {"bilevel": bilevel, "two_path": two_path, "trilevel": trilevel, "diamond": diamond}
FIXED: dict[str, Any] = {"multiplier": 20.0, "num_steps": 3, "step_size": 0.1}
BARRIER: dict[str, Any] = {"rule": "barrier", "barrier": 0.5, "num_steps": 3, "step_size": 0.1}


def error(case: Case, program: Program, num_pullbacks: int) -> float:
    """Return the relative error of the last of several pullbacks."""
    expected = case.reference()
    for _ in range(num_pullbacks):
        found = program.gradient(case.top)["x"]
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", CASES)
def test_the_error_falls_like_one_over_the_multiplier(name: str) -> None:
    case = CASES[name](0.1)
    made = [case.program(lambda m=m: Penalty(m, num_steps=100, step_size=0.15)) for m in (1e2, 1e4)]
    larger, smaller = (error(case, program, 1) for program in made)
    assert larger < 0.02
    assert 90 < larger / smaller < 110


@pytest.mark.parametrize(("name", "multiplier"), [*[(name, 0.5) for name in CASES], ("two_path", 1e3)])
def test_a_quadratic_lower_problem_is_exact_at_any_multiplier(name: str, multiplier: float) -> None:
    case = CASES[name]()
    assert error(case, case.program(lambda: Penalty(multiplier, num_steps=75, step_size=0.3)), 1) < 1e-8


def settled(case: Case, num_pullbacks: int, **settings: Any) -> tuple[float, float]:
    """Return the relative error of the last of several pullbacks under the barrier rule, and its multiplier."""
    program = case.program(lambda: Penalty(rule="barrier", step_size=0.3, **settings))
    found = error(case, program, num_pullbacks)
    return found, program.statistics()["w/penalty_multiplier"]


def test_the_barrier_rule_settles_at_the_exact_gradient_of_a_quadratic() -> None:
    """And its multiplier where the conditions of stationarity put it."""
    case, barrier = bilevel(), 1.0
    found, multiplier = settled(case, 40, barrier=barrier, num_steps=40)
    assert found < 1e-5
    lam, point = case.start.clone().requires_grad_(), case.values["w"].detach().requires_grad_()
    direct, v = torch.autograd.grad(case.losses["lam"](lam=lam, w=point), [lam, point])
    whole = case.reference()
    p = whole - direct
    assert multiplier == pytest.approx(float(barrier * (v @ v + p @ p) / (p @ whole)), rel=1e-3)


def test_the_error_of_the_barrier_rule_falls_like_one_over_the_barrier() -> None:
    """Beside the multiplier, which is proportional to it, nothing has settled elsewhere or goes round."""
    errors = [settled(bilevel(0.1), 25, barrier=barrier, num_steps=20)[0] for barrier in (10.0, 100.0)]
    assert errors[0] < 0.03
    assert 8 < errors[0] / errors[1] < 12


def hand_made(rule: str) -> tuple[Program, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], Tensor]:
    """Return a program, dg/dw and dg/du as functions of w, and the upper gradient at w."""
    settings = FIXED if rule == "fixed" else BARRIER
    growth = {"growth": 5.0} if rule == "fixed" else {}
    program = pair(hypergradient=lambda: Penalty(**settings, **growth))
    batch = program.problems["w"].stream.last()
    u, w = (program.problems[name].module.x.detach() for name in "uw")
    low = lambda w: (w - batch.mean(0)) + torch.exp(u) * w  # noqa: E731
    high = lambda w: 0.5 * torch.exp(u) * w**2  # noqa: E731
    v = (4 * (w - program.problems["u"].stream.last()) ** 3).mean(0)
    return program, low, high, v


def test_the_fixed_rule_is_that_of_the_paper() -> None:
    program, low, high, v = hand_made("fixed")
    z = y = program.problems["w"].module.x.detach().clone()
    for multiplier in (20.0, 25.0, 30.0):
        for _ in range(3):
            y = y - 0.1 / multiplier * (v + multiplier * low(y))
        expected = multiplier * (high(y) - high(z))
        assert torch.allclose(program.gradient("u")["x"], expected, rtol=1e-10)
        assert program.statistics() == {"w/penalty_multiplier": multiplier}


@pytest.mark.parametrize("weight", [0.0, 0.7])
def test_the_barrier_rule_is_that_of_the_paper(weight: float) -> None:
    """But for the step of y, which is divided by a large multiplier; the upper loss may have a direct part."""
    program, low, high, v = hand_made("barrier")
    w, u = (program.problems[name] for name in "wu")
    direct = weight * torch.cos(u.module.x.detach())

    def goal(batch: Tensor, *, w: Any, u: Any) -> Tensor:
        return upper_loss(batch, w=w) + weight * torch.sin(u()).sum()

    upper = Problem("u", u.module, goal, roles={"w": "w", "u": "u"}, stream=u.stream)
    program = Program([w, upper], program.graph)
    y = w.module.x.detach().clone()
    multipliers = []
    for _ in range(10):
        z = y
        for _ in range(3):
            z = z - 0.1 * low(z)
        slope, shift = low(y), high(y) - high(z)
        square = slope @ slope + shift @ shift
        multipliers.append(max(float((0.5 * square - v @ slope - direct @ shift) / square), 0.0))
        y = y - 0.1 / max(multipliers[-1], 1.0) * (v + multipliers[-1] * slope)
        assert torch.allclose(program.gradient("u")["x"], multipliers[-1] * shift + direct, rtol=1e-10)
    # Both sides of the rule.
    assert min(multipliers) == 0.0
    assert max(multipliers) > 1


@pytest.mark.parametrize("settings", [FIXED, {**FIXED, "growth": 1.0}, BARRIER, {**FIXED, "warm_start": False}])
def test_a_resumed_run_is_bit_identical(settings: dict[str, Any]) -> None:
    def make() -> Program:
        return pair({"unroll_steps": 2}, hypergradient=lambda: Penalty(**settings))

    assert_resumes(make, num_ticks=7, num_more=5)


@pytest.mark.parametrize("settings", [FIXED, BARRIER], ids=["fixed", "barrier"])
@pytest.mark.parametrize("graph", [BILEVEL, TRILEVEL], ids=["bilevel", "trilevel"])
def test_two_ranks_equal_the_joined_batch(settings: dict[str, Any], graph: Graph) -> None:
    first, second = two_ranks(graph, lambda: Penalty(**settings), "u")
    assert_identical(first, second)
    joined = ranked(graph, lambda: Penalty(**settings)).gradient("u", batches(graph))
    assert torch.allclose(first["x"], joined["x"], rtol=1e-9)
