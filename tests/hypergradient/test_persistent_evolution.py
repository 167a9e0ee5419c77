"""Persistent evolution strategies against the gradient through all steps, and against a plain loop."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from mlotool.hypergradient import EvolutionStrategies
from mlotool.program import AbstractHypergradient, Graph, Problem, Program, Schedule
from tests.hypergradient.test_evolution import linear, program, quadratic
from tests.program.small import assert_identical, assert_resumes, momentum, numbers
from tests.programs import Point

SLOPE, STEPS = numbers(1.0, -2.0, 3.0), 3


def gradient_after(num_rounds: int) -> Tensor:
    """Return the derivative of `linear` through all the steps of pull: w - u shrinks by 0.9 a step."""
    return (1 - 0.9 ** (STEPS * num_rounds)) * SLOPE + 0.1


def deviation(num_rounds: int, num_pairs: int) -> Tensor:
    """Return the standard error of the estimate: the moments of normal directions give it in closed form."""
    # What each round's direction has in the loss.
    own = [gradient_after(1), *(0.9 ** (STEPS * age) * (gradient_after(1) - 0.1) for age in range(1, num_rounds))]
    squares = torch.stack(own).square().sum()
    return ((num_rounds * squares + gradient_after(num_rounds).square()) / num_pairs).sqrt()


def test_the_estimate_is_of_the_gradient_through_all_rounds() -> None:
    """From values after three steps each; one that begins anew in each round stays at the gradient of three."""
    num_pairs, num_rounds = 300, 3
    make = partial(EvolutionStrategies, num_pairs, sigma=0.5)
    persistent, truncated = program(make(persistent=True), linear), program(make(), linear)
    for number in range(1, num_rounds + 1):
        found, short = (each.gradient("u", {"w": [None] * STEPS})["x"] for each in (persistent, truncated))
        error = deviation(number, num_pairs)
        assert bool(((found - gradient_after(number)).abs() < 3.5 * error).all())
    assert bool(((short - gradient_after(1)).abs() < 3.5 * error).all())
    # So the two cannot be taken for each other.
    assert float(((gradient_after(num_rounds) - gradient_after(1)).abs() / error).max()) > 4.5


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


@pytest.mark.parametrize("restart_every", [None, 2])
def test_a_resumed_run_is_bit_identical(restart_every: int | None) -> None:
    def make() -> Program:
        built = program(EvolutionStrategies(2, persistent=True, restart_every=restart_every), quadratic)
        built.problems["w"].optimizer = momentum(built.problems["w"].theta.values())
        return built

    assert_resumes(make, num_ticks=10, num_more=5)


def test_a_pair_that_diverged_begins_again_by_itself() -> None:
    algorithm = EvolutionStrategies(40, sigma=1.0, persistent=True)
    built = program(algorithm, lambda w, u: torch.log(u[0] + 1.5) + w.sum())
    built.gradient("u")
    failed = int(built.statistics()["w/evolution_failed_pairs"])
    assert 0 < failed < 40
    history = built.algorithm_state("w").histories["u"]
    assert len(history.sums) == 40 - failed
    kept = {number: each[0].clone() for number, each in history.sums.items()}
    assert bool(built.gradient("u")["x"].isfinite().all())
    # Those that are there again have one direction behind them, the others two.
    like, draws = [built.problems["u"].module.x.detach()], torch.Generator().manual_seed(0)
    algorithm._draw(like, None, draws)
    second = [each[0] for each in algorithm._draw(like, None, draws)]
    for number, each in built.algorithm_state("w").histories["u"].sums.items():
        assert torch.allclose(each[0], kept.get(number, 0) + second[number])


def test_each_reader_has_particles_of_its_own() -> None:
    """Two problems that shape w: what one of them does to its particles is nothing to the other."""

    def make(names: str) -> dict[str, Tensor]:
        def pull(batch: Any, *, w: Any, a: Any, b: Any) -> Tensor:
            return 0.5 * (w() - a() - b()).square().sum()

        sgd = partial(torch.optim.SGD, lr=0.1)
        roles = {"w": "w", "a": "a", "b": "b"}
        algorithm = EvolutionStrategies(2, sigma=0.3, directions="orthogonal", persistent=True)
        problems = [
            Problem("w", Point(numbers(0.5, 0.1)), pull, roles=roles, optimizer=sgd, hypergradient=algorithm),
            Problem("a", Point(numbers(0.3, 0.2)), lambda batch, *, w: w().sum(), roles={"w": "w"}),
            Problem("b", Point(numbers(0.5, 0.4)), lambda batch, *, w: -5 * w().sum(), roles={"w": "w"}),
        ]
        built = Program(problems, Graph({"a": ["w"], "b": ["w"]}, {"w": ["a", "b"]}))
        built.gradient("a")
        for name in names:
            # The directions of the second round of `a` are to be the same in both orders.
            memory = built.engine.memories[built.engine.numbers["w"]]
            memory.value = memory.value._replace(generator=torch.Generator().manual_seed(7).get_state())
            found = built.gradient(name)["x"]
        return {"x": found}

    assert_identical(make("a"), make("ba"))


def one(algorithm: AbstractHypergradient, **settings: Any) -> Program:
    low = program(algorithm, linear).problems
    lower = Problem(
        "w",
        low["w"].module,
        low["w"].loss,
        roles={"w": "w", "u": "u"},
        optimizer=momentum,
        hypergradient=algorithm,
        **settings,
    )
    return Program([lower, low["u"]], Graph({"u": ["w"]}, {"w": ["u"]}))
