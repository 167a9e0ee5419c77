"""Algorithms that keep something from pullback to pullback keep it for each task."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from mlotool.hypergradient import SABA, EvolutionStrategies, FixedPoint, Implicit, Penalty
from mlotool.program import AbstractHypergradient, Graph, Problem, Program, Schedule, Stream
from tests.hypergradient.two_levels import two_levels
from tests.problem import test_tasks as maml
from tests.program.small import assert_identical, numbers, parameters
from tests.programs import Point

ALGORITHMS: dict[str, Callable[[], AbstractHypergradient]] = {
    "penalty": lambda: Penalty(multiplier=5.0, growth=1.0, num_steps=2, step_size=0.1),
    "cold penalty": lambda: Penalty(multiplier=5.0, num_steps=2, step_size=0.1, warm_start=False),
    "soba": lambda: Implicit(FixedPoint(1, 0.1), warm_start=True),
    "saba": lambda: SABA(step_size=0.1, key="number"),
    "evolution": lambda: EvolutionStrategies(num_pairs=2, sigma=0.5),
}


def rounds() -> list[list[dict[str, Tensor]]]:
    """Return episodes of each task for one pullback after another: two batches that take turns."""
    data = [{**each, "number": torch.tensor(index // maml.TASKS)} for index, each in enumerate(maml.episodes())]
    return [data[: maml.TASKS], data[maml.TASKS :]] * 2


@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_pullbacks_in_a_row_equal_those_of_a_loop_over_tasks(name: str, clip: float | None) -> None:
    make, settings = ALGORITHMS[name], {"gradient_clip_norm": clip}
    sees_steps = make().sees_steps

    def gradients(built: Program, batches: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        return [built.gradient("meta", {"learner": [b] * 2 if sees_steps else b, "meta": b}) for b in batches]

    together = gradients(maml.maml(maml.TASKS, make(), **settings), [maml.stacked(each) for each in rounds()])
    alone = [
        gradients(maml.maml(None, make(), **settings), [each[task] for each in rounds()]) for task in range(maml.TASKS)
    ]
    for number, found in enumerate(together):
        for key, value in found.items():
            expected = sum(each[number][key] for each in alone) / maml.TASKS
            assert torch.allclose(value, expected, rtol=1e-9, atol=1e-12)


def low(batch: Any, *, w: Any, u: Any) -> Tensor:
    return (0.5 * batch["curvature"] * (w() - u()) ** 2 + 0.1 * w() ** 4).sum()


def high(batch: Any, *, w: Any, u: Any) -> Tensor:
    return 0.5 * (w() - batch["target"]).square().sum() + 0.2 * u().square().sum()


CURVATURE, TARGET = numbers(1.0, 2.0, 3.0)[:, None], numbers(0.3, -0.8, 0.5)[:, None] * numbers(1.0, 2.0)


def program(hypergradient: AbstractHypergradient, tasks: int | None, **settings: Any) -> Program:
    """Return w, pulled to u, with one curvature and target a task."""
    lower, upper = (Point(numbers(0.5, -0.3)), low), (Point(numbers(0.4, 0.2)), high)
    return two_levels(lower, upper, hypergradient, tasks=tasks, **settings)


def barrier() -> Penalty:
    return Penalty(rule="barrier", barrier=0.5, num_steps=3, step_size=0.1)


def test_one_multiplier_of_the_barrier_rule_serves_all_tasks() -> None:
    """The rule of the mean over tasks, written out; inner products over y are means as well."""
    built = program(barrier(), 3)
    u = numbers(0.4, 0.2)
    y = z = numbers(0.5, -0.3).expand(3, 2)
    v, direct = z - TARGET, 0.4 * u
    slope_of = lambda y: CURVATURE * (y - u) + 0.4 * y**3  # noqa: E731
    batch = {"curvature": CURVATURE, "target": TARGET}
    multipliers = []
    for _ in range(8):
        solved = y
        for _ in range(3):
            solved = solved - 0.1 * slope_of(solved)
        slope, shift = slope_of(y), (CURVATURE * (solved - y)).mean(0)
        square = slope.square().sum() / 3 + shift @ shift
        product = (v * slope).sum() / 3 + direct @ shift
        multipliers.append(max(float(0.5 - product / square), 0.0))
        y = y - 0.1 / max(multipliers[-1], 1.0) * (v + multipliers[-1] * slope)
        found = built.gradient("u", {"w": batch, "u": batch})["x"]
        assert torch.allclose(found, direct + multipliers[-1] * shift, rtol=1e-10)
    assert max(multipliers) > 1


SLOPES = numbers(1.0, -2.0, 3.0)[:, None] * numbers(1.0, 0.5)


def pull(batch: Any, *, w: Any, u: Any) -> Tensor:
    """With SGD, w is linear in u."""
    return 0.5 * (w() - u()).square().sum()


def slope_along_w(batch: Tensor, *, w: Any, u: Any) -> Tensor:
    return (w() * batch).sum() + 0 * u().sum()


def linear(algorithm: EvolutionStrategies, tasks: int | None, slopes: Tensor) -> Program:
    """Return an upper problem of three tasks, whose lower one has as many or is shared."""
    roles, start, sgd = {"w": "w", "u": "u"}, Point(numbers(0.5, -0.3)), partial(torch.optim.SGD, lr=0.1)
    problems = [
        Problem("w", start, pull, roles=roles, optimizer=sgd, unroll_steps=3, hypergradient=algorithm, tasks=tasks),
        Problem(
            "u", Point(numbers(0.5, -0.3)), slope_along_w, roles=roles, stream=Stream(slopes, 3, shuffle=False), tasks=3
        ),
    ]
    return Program(problems, Graph({"u": ["w"]}, {"w": ["u"]}))


@pytest.mark.parametrize("broken", [False, True])
def test_evolution_estimates_the_gradient_of_each_upper_task_from_its_own_loss(broken: bool) -> None:
    """Two directions are enough for the two parameters of a task, not for the six of all; NaN stays in its task."""
    slopes = SLOPES.clone()
    if broken:
        slopes[0, 0] = float("nan")
    algorithm = EvolutionStrategies(2, sigma=0.1, directions="orthogonal")
    built = linear(algorithm, 3, slopes)
    found = built.gradient("u")["x"]
    expected = (1 - 0.9**3) * SLOPES
    expected[0] *= float("nan") if broken else 1.0
    assert torch.allclose(found, expected, rtol=1e-9, equal_nan=True)
    assert built.statistics()["w/evolution_failed_pairs"] == (2 if broken else 0)


@pytest.mark.parametrize("shift", [0.0, 1e6])
def test_ranks_of_one_task_do_not_see_the_losses_of_another(shift: float) -> None:
    algorithm = EvolutionStrategies(2, sigma=0.5, shaping="rank")
    values = torch.tensor([[[1.0, 2.0], [0.0, 7.0]], [[4.0, 3.0], [3.0, 9.0]]], dtype=torch.float64)
    values[:, :, 0] += shift
    # Ranks of a task are -1/2, -1/6, 1/6, 1/2, and the weight is their difference over 2.
    assert torch.allclose(algorithm._weights(values)[0], torch.tensor([[1 / 6, -1 / 3], [1 / 6, -1 / 3]]).double())


@pytest.mark.parametrize("name", ["penalty", "barrier", "soba", "saba", "evolution"])
def test_a_resumed_run_is_bit_identical(name: str) -> None:
    class Episodes:
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            return {**maml.episodes()[index], "number": torch.tensor(index // maml.TASKS)}

    make = barrier if name == "barrier" else ALGORITHMS[name]

    def built() -> Program:
        return maml.maml(maml.TASKS, make(), batches=Episodes())  # type: ignore[arg-type]

    whole, first, second = built(), built(), built()
    runs = Schedule(whole), Schedule(first), Schedule(second)
    for _ in range(5):
        runs[1].tick()
    second.load_state_dict(first.state_dict())
    runs[2].load_state_dict(runs[1].state_dict())
    for _ in range(4):
        runs[2].tick()
    for _ in range(9):
        runs[0].tick()
    assert_identical(parameters(second), parameters(whole))
