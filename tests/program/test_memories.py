"""What algorithms keep belongs to the program and the problem; their settings may be shared."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from mlotool.core.errors import ConfigError
from mlotool.core.private import tree_map
from mlotool.hypergradient import SABA, EvolutionStrategies, FixedPoint, Implicit, Nystrom, Penalty
from mlotool.program import AbstractHypergradient, Graph, Problem, Program, Schedule, Stream
from tests.program.small import assert_identical, numbers, parameters, samples
from tests.programs import Point

KEEPING: dict[str, Callable[[], AbstractHypergradient]] = {
    "warm": lambda: Implicit(FixedPoint(3, 0.1), warm_start=True, report_every=2),
    "nystrom": lambda: Implicit(Nystrom(rank=2, rho=10.0)),
    "penalty": lambda: Penalty(multiplier=20.0, growth=0.5, num_steps=2, step_size=0.1),
    "barrier": lambda: Penalty(rule="barrier", barrier=0.5, num_steps=2, step_size=0.1),
    "saba": lambda: SABA(step_size=0.1),
    "evolution": lambda: EvolutionStrategies(2, sigma=0.1, persistent=True, restart_every=5),
}
"""All that keep something from one pullback to the next."""

NUM_TICKS = 6


def pull(batch: Tensor, *, w: Any, u: Any, shift: float) -> Tensor:
    return 0.5 * ((w() - batch) ** 2).sum(1).mean() + 0.5 * (torch.exp(u() + shift) * w() ** 2).sum()


def meet(batch: Any, **lowers: Any) -> Tensor:
    return sum((((each() - 1) ** 4).sum() for each in lowers.values()), torch.zeros(()))


def program(*algorithms: AbstractHypergradient, seed: int = 0) -> Program:
    """Return a program of a lower problem for each algorithm, and an upper one that shapes and reads them all."""
    names = [f"w{number}" for number in range(len(algorithms))]
    problems = [
        Problem(
            name,
            Point(numbers(0.5, -0.3, 0.8) + 0.1 * seed),
            partial(pull, shift=0.2 * number),
            roles={"w": name, "u": "u"},
            stream=Stream(samples(12, seed + number), 4, shuffle=False),
            optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
            hypergradient=algorithm,
        )
        for number, (name, algorithm) in enumerate(zip(names, algorithms, strict=True))
    ]
    optimizer = partial(torch.optim.SGD, lr=0.01)
    roles = {name: name for name in names}
    problems.append(Problem("u", Point(numbers(0.1, 0.2, -0.4)), meet, roles=roles, optimizer=optimizer))
    return Program(problems, Graph({"u": names}, {name: ["u"] for name in names}))


def ticked(*programs: Program) -> list[dict[str, Any]]:
    """Tick the programs in turn; return their parameters and statistics."""
    schedules = [Schedule(each) for each in programs]
    for _ in range(NUM_TICKS):
        for schedule in schedules:
            schedule.tick()
    return [{"parameters": parameters(each), "statistics": each.statistics()} for each in programs]


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert_identical(a["parameters"], b["parameters"])
    assert a["statistics"] == b["statistics"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", KEEPING)
def test_programs_and_problems_that_share_settings_do_not_meet(name: str) -> None:
    make, shared = KEEPING[name], KEEPING[name]()
    together = ticked(program(shared), program(shared, seed=3))
    alone = [*ticked(program(make())), *ticked(program(make(), seed=3))]
    assert_same(together[0], alone[0])
    assert_same(together[1], alone[1])
    assert_same(ticked(program(shared, shared))[0], ticked(program(make(), make()))[0])


@pytest.mark.parametrize("name", KEEPING)
def test_what_is_kept_changes_what_comes(name: str) -> None:
    """Else the tests above would say nothing."""
    made, fresh = (program(KEEPING[name]()) for _ in range(2))
    ticked(made)
    value, algorithm = made.internals.algorithm_state("w0"), KEEPING[name]()
    written = repr(algorithm.state_dict(value))
    ticked(made)
    # A value that was kept does not change.
    later = made.internals.algorithm_state("w0")
    assert repr(algorithm.state_dict(value)) == written != repr(algorithm.state_dict(later))
    before = made.state_dict()
    fresh.load_state_dict(before)
    kept = [each.gradient("u")["x"] for each in (made, fresh)]
    assert torch.equal(*kept)
    made.load_state_dict(before)
    made.internals.engine.memories[0].value = KEEPING[name]().initial_state()
    assert not torch.equal(made.gradient("u")["x"], kept[0])


@pytest.mark.parametrize("name", ["warm", "penalty", "saba", "evolution"])
def test_what_is_kept_has_the_shapes_of_parameters(name: str) -> None:
    ticked(made := program(KEEPING[name]()))
    state = made.state_dict()
    kept = tree_map(lambda x: x[:1] if isinstance(x, Tensor) and x.shape == (3,) else x, state["w0"]["hypergradient"])
    with pytest.raises(ConfigError, match=r"state\.w0\.hypergradient: found a tensor of shape"):
        made.load_state_dict({**state, "w0": {**state["w0"], "hypergradient": kept}})
