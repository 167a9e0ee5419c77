"""What real models bring along: BatchNorm, dropout, frozen and tied and unused parameters, nested batches."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlotool.core.errors import ConfigError
from mlotool.hypergradient import ConjugateGradient, Exact, Implicit
from mlotool.program import AbstractHypergradient, Graph, Problem, Program, Schedule
from tests.hypergradient.two_levels import two_levels
from tests.program.reweighting import (
    ALGORITHMS,
    FD,
    REVERSE,
    by_torch,
    flat,
    relative_error,
    reweighting,
    sample_losses,
    weighted,
    weighted_by_plain_detach,
)
from tests.program.small import Mlp, numbers, samples, sgd
from tests.programs import Point


def test_stop_gradient_makes_finite_differences_agree_with_double_backward() -> None:
    reverse, difference = reweighting(REVERSE), reweighting(FD)
    expected = reverse.gradient("weigher")
    assert relative_error(expected, by_torch(reverse)) < 1e-12
    assert relative_error(difference.gradient("weigher"), expected) < 1e-4
    plain = reweighting(FD, lower=weighted_by_plain_detach)
    with pytest.warns(UserWarning, match=r"problems.model: the product with M .*stop_gradient"):
        assert relative_error(plain.gradient("weigher"), expected) > 0.05
    assert relative_error(reweighting(REVERSE, lower=weighted_by_plain_detach).gradient("weigher"), expected) < 1e-12


def test_stop_gradient_in_a_count_that_depends_on_the_data() -> None:
    def chunked(batch: Tensor, *, model: Any, weigher: Any) -> Tensor:
        total = torch.zeros((), dtype=batch.dtype)
        for row in batch[batch[:, 0] > 0]:
            total = total + weighted(row[None], model=model, weigher=weigher)
        return total + 0.1 * sample_losses(batch, model).mean()

    expected = reweighting(REVERSE, lower=chunked).gradient("weigher")
    assert relative_error(reweighting(FD, lower=chunked).gradient("weigher"), expected) < 1e-4
    nothing = {"model": -samples(4).abs()}
    program = reweighting(FD, lower=chunked)
    assert float(flat(program.gradient("weigher", nothing)).norm()) == 0.0
    assert relative_error(program.gradient("weigher"), expected) < 1e-4


def _with_dropout(make: Callable[[], AbstractHypergradient]) -> Program:
    return reweighting(make, Mlp(nn.Dropout(0.1)))


def _draws(program: Program, count: int) -> Tensor:
    program.random.manual_seed(0)
    return torch.stack([flat(program.gradient("weigher")) for _ in range(count)])


def test_finite_differences_pair_their_random_numbers() -> None:
    """Unpaired, the masks' difference is divided by the radius 1e-5: the noise would be thousands of times larger."""
    difference, reverse = (_draws(_with_dropout(make), 60) for make in (FD, REVERSE))
    noise = [float(each.std(0).norm()) for each in (difference, reverse)]
    assert noise[1] > 0  # the masks do something
    assert noise[0] <= 2 * noise[1]
    # They see the very same masks, so they agree draw by draw.
    assert float((difference - reverse).norm() / reverse.norm()) < 1e-4


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_same_seed_gives_the_same_gradient(name: str) -> None:
    program = _with_dropout(ALGORITHMS[name])
    first, second = (_draws(program, 2) for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first[0], first[1])


def test_all_products_of_one_solve_see_one_mask() -> None:
    """Exact builds H column by column: with a mask for each column, it would not be H at all."""
    program = _with_dropout(lambda: Implicit(Exact(damping=10.0), "finite_difference"))
    reverse = _with_dropout(lambda: Implicit(Exact(damping=10.0)))
    assert torch.allclose(_draws(program, 3), _draws(reverse, 3), rtol=1e-3, atol=1e-6)


def test_all_evaluations_of_one_differentiated_pullback_see_the_same_random_numbers() -> None:
    """Nested: the lower pullback is differentiated, for which its loss is evaluated again and again."""
    drawn: list[Tensor] = []

    def low(batch: None, *, low: Any, mid: Any) -> Tensor:
        drawn.append(1 + torch.rand(2, dtype=torch.float64))
        return (drawn[-1] * (low() - mid()) ** 2 + 0.1 * low() ** 4).sum()

    def mid(batch: None, *, mid: Any, low: Any, top: Any) -> Tensor:
        return ((mid() - top()) ** 2 + (low() - 1) ** 2 + low() * mid() ** 2).sum()

    def top(batch: None, *, mid: Any) -> Tensor:
        return (mid() ** 3).sum()

    roles = {"low": ("low", "mid"), "mid": ("mid", "low", "top"), "top": ("mid",)}
    problems = [
        Problem(
            name,
            Point(numbers(0.3, 0.5)),
            loss,
            roles={role: role for role in roles[name]},
            hypergradient=Implicit(Exact()),
        )
        for name, loss in {"low": low, "mid": mid, "top": top}.items()
    ]
    graph = Graph({"top": ["mid"], "mid": ["low"]}, {"low": ["mid"], "mid": ["top"]})
    Program(problems, graph).gradient("top")
    assert len(drawn) > 2
    assert all(torch.equal(draw, drawn[0]) for draw in drawn)


def test_a_loss_that_does_not_depend_on_its_parameters_is_an_error() -> None:
    problem = Problem("w", Point(numbers(1.0)), lambda batch, *, w: w().detach().sum(), roles={"w": "w"}, optimizer=sgd)
    program = Program([problem], Graph())
    for call in (lambda: program.gradient("w"), Schedule(program).tick):
        with pytest.raises(ConfigError, match=r"problems.w.loss: the loss does not depend .*expected.*Give it a role"):
            call()


def test_a_failed_solve_warns_and_gives_no_nan() -> None:
    def saddle(batch: Tensor, *, w: Any, u: Any) -> Tensor:
        return (-(w() ** 2) + w() * u()).sum()

    upper = Point(numbers(1.0, 1.0)), lambda batch, *, w: (w() ** 2).sum()
    program = two_levels((Point(numbers(1.0, 2.0)), saddle), upper, Implicit(ConjugateGradient()))
    with pytest.warns(
        UserWarning, match=r"ConjugateGradient solve at problem 'w' ended with negative curvature.*Raise"
    ):
        found = program.gradient("u")["x"]
    # H = -2: v over the size of its curvature is v / 2, and v = (2, 4).
    assert torch.equal(found, -numbers(1.0, 2.0))
    program.gradient("u")  # it does not warn again
