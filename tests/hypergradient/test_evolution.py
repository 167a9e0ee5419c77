"""Evolution strategies against gradients of the smoothed upper loss of a plain loop."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlotool.core.errors import ConfigError
from mlotool.hypergradient import EvolutionStrategies, Exact, Implicit, Unrolled
from mlotool.hypergradient.evolution import _centred_ranks
from mlotool.program import AbstractHypergradient, Program, Schedule, Stream
from tests.hypergradient.test_unrolled import BATCHES, OPTIMIZERS, flat, upper_values
from tests.hypergradient.test_unrolled import program as unrolled_program
from tests.hypergradient.two_levels import two_levels
from tests.program.small import assert_identical, assert_resumes, numbers, parameters, samples, web
from tests.programs import Point

sgd = partial(torch.optim.SGD, lr=0.1)


def pull(batch: Any, *, w: Any, u: Any) -> Tensor:
    """With SGD, w is a linear function of u."""
    return 0.5 * (w() - u()).square().sum()


def program(
    hypergradient: AbstractHypergradient, goal: Callable[[Tensor, Tensor], Tensor], *, steps: int = 3, **settings: Any
) -> Program:
    lower = Point(numbers(0.5, -0.3, 0.8)), pull
    upper = Point(numbers(0.1, 0.2, -0.4)), lambda batch, *, w, u: goal(w(), u())
    of_upper = {"optimizer": sgd, **settings}
    return two_levels(lower, upper, hypergradient, of_upper=of_upper, optimizer=sgd, unroll_steps=steps)


def linear(w: Tensor, u: Tensor) -> Tensor:
    return (w * numbers(1.0, -2.0, 3.0)).sum() + 0.1 * u.sum()


def quadratic(w: Tensor, u: Tensor) -> Tensor:
    return (w - 1).square().sum() + (w * u).sum()


@pytest.mark.parametrize("num_pairs", [3, 6])
def test_orthogonal_directions_are_exact_for_a_linear_function(num_pairs: int) -> None:
    algorithm = EvolutionStrategies(num_pairs, sigma=2.0, directions="orthogonal")
    found = program(algorithm, linear).gradient("u")["x"]
    expected = (1 - 0.9**3) * numbers(1.0, -2.0, 3.0) + 0.1
    assert torch.allclose(found, expected, rtol=1e-12)


def test_a_quadratic_within_the_standard_error() -> None:
    """Its smoothed gradient is its gradient; the estimate's variance is |g|^2 + g_i^2 a pair."""
    num_pairs = 500
    found = program(EvolutionStrategies(num_pairs, sigma=0.5), quadratic, steps=2).gradient("u")["x"]
    exact = program(Unrolled(), quadratic, steps=2).gradient("u")["x"]
    deviation = ((exact.square().sum() + exact.square()) / num_pairs).sqrt()
    assert bool(((found - exact).abs() < 3.5 * deviation).all())


@pytest.mark.parametrize("name", ["momentum", "adam"])
@pytest.mark.parametrize("way", ["loss", "start", "lr"])
def test_in_the_limit_it_is_the_unrolled_gradient(name: str, way: str) -> None:
    """In a schedule: the recorded steps, on their batches, from their start and state."""

    def make(hypergradient: AbstractHypergradient) -> Program:
        stream = Stream(samples(12, 1), 4, seed=1)
        return unrolled_program(way, OPTIMIZERS[name], hypergradient, stream=stream)

    size = 4 if way == "start" else 1 if way == "lr" else 3
    algorithm = EvolutionStrategies(size, sigma=1e-5, directions="orthogonal")
    built, reference = make(algorithm), make(Unrolled())
    schedules = Schedule(built), Schedule(reference)
    for _ in range(len(BATCHES)):
        for schedule in schedules:
            schedule.tick()
    found, expected = (upper_values(each) for each in (built, reference))
    assert torch.allclose(found, expected, rtol=1e-6, atol=1e-8)
    assert not torch.allclose(found, upper_values(make(Unrolled())), rtol=1e-4)


def test_given_batches_are_unrolled_from_the_current_parameters() -> None:
    algorithm = EvolutionStrategies(3, sigma=1e-5, directions="orthogonal")
    found = flat(unrolled_program("loss", OPTIMIZERS["adam"], algorithm).gradient("u", {"w": BATCHES}))
    expected = flat(unrolled_program("loss", OPTIMIZERS["adam"]).gradient("u", {"w": BATCHES}))
    assert torch.allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("num_ticks", [0, 6])
def test_a_chain_of_solutions_is_rolled_out_in_turn(num_ticks: int) -> None:
    def make(hypergradient: Callable[[], AbstractHypergradient]) -> Program:
        settings: dict[str, Any] = {name: {"optimizer": sgd} for name in ("low", "mid", "top")}
        settings["low"]["unroll_steps"] = 2
        return web({"top": ["low"]}, {"low": ["mid"], "mid": ["top"]}, settings=settings, hypergradient=hypergradient)

    algorithm = partial(EvolutionStrategies, 3, 1e-5, "orthogonal")
    built, reference = make(algorithm), make(Unrolled)
    for each in (built, reference):
        schedule = Schedule(each)
        for _ in range(num_ticks):
            schedule.tick()
    found, expected = (each.gradient("top")["x"] for each in (built, reference))
    # Once mid has read low, low's steps are simulated on, and mid's are replayed with low as it then is.
    assert torch.allclose(found, expected, rtol=1e-3 if num_ticks else 1e-5)


def test_nothing_is_updated_and_the_generators_are_left_alone() -> None:
    def noisy(batch: Any, *, w: Any, u: Any) -> Tensor:
        return (nn.functional.dropout(w(), 0.5) - u()).square().sum()

    built = program(EvolutionStrategies(4), lambda w, u: nn.functional.dropout(w, 0.5).round().sum())
    built.problems["w"].loss = noisy
    before, state = parameters(built), torch.get_rng_state()
    built.gradient("u")
    assert_identical(parameters(built), before)
    assert torch.equal(torch.get_rng_state(), state)


def test_both_signs_draw_the_same_random_numbers() -> None:
    """Else the difference would be that of two dropout masks, over sigma."""
    built = program(EvolutionStrategies(4, sigma=1e-8), lambda w, u: nn.functional.dropout(w, 0.5).sum())
    built.problems["w"].loss = lambda batch, *, w, u: (nn.functional.dropout(w(), 0.5) - u()).square().sum()
    assert float(built.gradient("u")["x"].norm()) < 20


def test_a_resumed_run_is_bit_identical() -> None:
    def make() -> Program:
        return program(EvolutionStrategies(2, shaping="rank"), quadratic)

    assert_resumes(make, num_ticks=7, num_more=5)


def test_ranks() -> None:
    found = _centred_ranks(numbers(3.0, 1.0, 1.0, float("inf"), 2.0))
    assert found.tolist() == [0.25, -0.375, -0.375, 0.5, 0.0]


def test_a_diverged_rollout_is_left_out() -> None:
    built = program(EvolutionStrategies(50, sigma=1.0), lambda w, u: torch.log(u[0] + 1.5) + u[1])
    found = built.gradient("u")["x"]
    assert bool(found.isfinite().all())
    assert 0 < built.statistics()["w/evolution_failed_pairs"] < 50


def test_another_algorithm_beside_it_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"problems.b.hypergradient: found Implicit.*the same hypergradient"):
        algorithms = iter([Implicit(Exact()), EvolutionStrategies(), Implicit(Exact())])
        web({"u": ["a", "b"]}, {"a": ["u"], "b": ["u"]}, hypergradient=lambda: next(algorithms))
