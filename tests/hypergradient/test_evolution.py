"""Evolution strategies against gradients of the smoothed upper loss of a plain loop, and of loops of particles."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from mlotool.hypergradient import EvolutionStrategies, Unrolled
from mlotool.program import AbstractHypergradient, Program, Schedule, Stream
from tests.hypergradient.test_unrolled import BATCHES, OPTIMIZERS, upper_values
from tests.hypergradient.test_unrolled import program as unrolled_program
from tests.hypergradient.two_levels import ticked, two_levels
from tests.program.small import assert_resumes, momentum, numbers, samples, web
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
    num_pairs = 200
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
    found, expected = (upper_values(ticked(each, len(BATCHES))) for each in (built, reference))
    assert torch.allclose(found, expected, rtol=1e-6, atol=1e-8)
    assert not torch.allclose(found, upper_values(make(Unrolled())), rtol=1e-4)


@pytest.mark.parametrize("num_ticks", [0, 6])
def test_a_chain_of_solutions_is_rolled_out_in_turn(num_ticks: int) -> None:
    def make(hypergradient: Callable[[], AbstractHypergradient]) -> Program:
        settings: dict[str, Any] = {name: {"optimizer": sgd} for name in ("low", "mid", "top")}
        settings["low"]["unroll_steps"] = 2
        return web({"top": ["low"]}, {"low": ["mid"], "mid": ["top"]}, settings=settings, hypergradient=hypergradient)

    algorithm = partial(EvolutionStrategies, 3, 1e-5, "orthogonal")
    built, reference = make(algorithm), make(Unrolled)
    found, expected = (ticked(each, num_ticks).gradient("top")["x"] for each in (built, reference))
    # Once mid has read low, low's steps are simulated on, and mid's are replayed with low as it then is.
    assert torch.allclose(found, expected, rtol=1e-3 if num_ticks else 1e-5)


def test_a_diverged_rollout_is_left_out() -> None:
    built = program(EvolutionStrategies(50, sigma=1.0), lambda w, u: torch.log(u[0] + 1.5) + u[1])
    found = built.gradient("u")["x"]
    assert bool(found.isfinite().all())
    assert 0 < built.statistics()["w/evolution_failed_pairs"] < 50


def test_a_schedule_equals_a_plain_loop_of_particles() -> None:
    """With momentum, x that moves, and particles that begin again after three rounds."""
    num_pairs, sigma, restart = 2, 0.3, 3
    make = partial(EvolutionStrategies, num_pairs, sigma, persistent=True, restart_every=restart, seed=5)
    built, draws = program(make(), quadratic, steps=2), torch.Generator().manual_seed(5)
    lower = built.problems["w"]
    lower.optimizer = momentum(lower.theta.values())
    schedule = Schedule(built)
    u, w, rate = built.problems["u"].module.x.detach().clone(), lower.module.x.detach().clone(), 0.1
    mean: tuple[Tensor, Tensor] = (w, torch.zeros_like(w))
    particles: list[tuple[Tensor, Tensor]] = []
    sums: list[Tensor] = []

    def advance(state: tuple[Tensor, Tensor], u: Tensor) -> tuple[Tensor, Tensor]:
        point, speed = state
        for _ in range(2):
            speed = 0.9 * speed + (point - u)
            point = point - rate * speed
        return point, speed

    for number in range(8):
        if number % restart == 0:
            particles, sums = [mean] * (2 * num_pairs), [torch.zeros_like(u)] * num_pairs
        directions = [each[0] for each in make()._draw([u], None, draws)]
        mean, estimate = advance(mean, u), torch.zeros_like(u)
        for pair, direction in enumerate(directions):
            sums[pair] = sums[pair] + direction
            values = []
            for side, sign in enumerate((1, -1)):
                moved = u + sign * sigma * direction
                particles[2 * pair + side] = advance(particles[2 * pair + side], moved)
                values.append(quadratic(particles[2 * pair + side][0], moved))
            estimate = estimate + (values[0] - values[1]) * sums[pair] / (2 * sigma * num_pairs)
        u = u - 0.1 * estimate
        schedule.tick()
        schedule.tick()
        assert torch.allclose(built.problems["u"].module.x, u, rtol=1e-9), number


@pytest.mark.parametrize(
    "settings", [{"shaping": "rank"}, {"persistent": True}, {"persistent": True, "restart_every": 2}]
)
def test_a_resumed_run_is_bit_identical(settings: dict[str, Any]) -> None:
    def make() -> Program:
        built = program(EvolutionStrategies(2, **settings), quadratic)
        built.problems["w"].optimizer = momentum(built.problems["w"].theta.values())
        return built

    assert_resumes(make, num_ticks=10, num_more=5)


def test_a_pair_that_diverged_begins_again_by_itself() -> None:
    algorithm = EvolutionStrategies(40, sigma=1.0, persistent=True)
    built = program(algorithm, lambda w, u: torch.log(u[0] + 1.5) + w.sum())
    built.gradient("u")
    failed = int(built.statistics()["w/evolution_failed_pairs"])
    assert 0 < failed < 40
    history = built.internals.algorithm_state("w")["histories"]["u"]
    assert len(history["sums"]) == 40 - failed
    kept = {number: each[0].clone() for number, each in history["sums"].items()}
    assert bool(built.gradient("u")["x"].isfinite().all())
    # Those that are there again have one direction behind them, the others two.
    like, draws = [built.problems["u"].module.x.detach()], torch.Generator().manual_seed(0)
    algorithm._draw(like, None, draws)
    second = [each[0] for each in algorithm._draw(like, None, draws)]
    for number, each in built.internals.algorithm_state("w")["histories"]["u"]["sums"].items():
        assert torch.allclose(each[0], kept.get(number, 0) + second[number])
