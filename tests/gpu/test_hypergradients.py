"""Hypergradients on the device: of solved programs against plain autograd, of every algorithm against the CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mlotool import EvolutionStrategies, Schedule
from mlotool.hypergradient import AbstractSolver, ConjugateGradient, Exact, Implicit
from tests import programs
from tests.gpu.placed import CPU, follow, on_the_cpu, parameters, placed, relative_error
from tests.hypergradient.every_algorithm import EVERY, program

pytestmark = [
    pytest.mark.gpu,
    # A few steps of a network of forty parameters: solvers say what they think of its curvature.
    pytest.mark.filterwarnings("ignore:The .* solve at problem 'model'"),
]

TICKS = 4
"""Two steps of the upper problem."""


def tolerance(name: str) -> float:
    """Differences of losses magnify rounding errors; all else is as exact as float64."""
    return 1e-5 if name.endswith("_difference") or name == "evolution" else 1e-9


@pytest.mark.parametrize("name", EVERY)
def test_it_equals_the_cpu(name: str, device: torch.device) -> None:
    if name.startswith("ggn"):
        pytest.importorskip("curvlinops")
    found = {}
    for where in (CPU, device):
        made = follow(placed(program(EVERY[name]), where), TICKS)
        gradient = made.gradient("weigher")
        assert all(tensor.device == where for tensor in gradient.values())
        found[where] = parameters(made), gradient
    (theta, gradient), (expected_theta, expected_gradient) = found[device], found[CPU]
    assert relative_error(theta, expected_theta) < tolerance(name)
    assert relative_error(gradient, expected_gradient) < tolerance(name)


STATES: dict[str, Callable[[], Any]] = {
    **EVERY,
    "persistent_evolution": lambda: EvolutionStrategies(num_pairs=2, sigma=0.01, persistent=True),
}


@pytest.mark.parametrize("name", STATES)
def test_it_goes_on_from_a_state_on_the_cpu(name: str, device: torch.device) -> None:
    """In the middle of an unroll, where recorded steps are a part of the state."""
    if name.startswith("ggn"):
        pytest.importorskip("curvlinops")
    whole, first, second = (placed(program(STATES[name]), device) for _ in range(3))
    schedules = [Schedule(each) for each in (whole, first, second)]
    for schedule, count in zip(schedules, (6, 3, 1), strict=True):
        for _ in range(count):
            schedule.tick()
    second.load_state_dict(on_the_cpu(first.state_dict()))
    schedules[2].load_state_dict(on_the_cpu(schedules[1].state_dict()))
    for _ in range(3):
        schedules[2].tick()
    found, expected = parameters(second), parameters(whole)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


CASES = {
    "bilevel": programs.bilevel,
    "ridge": programs.ridge,
    "logistic": programs.logistic,
    "trilevel": programs.trilevel,
    "two_path": programs.two_path,
    "diamond": programs.diamond,
    "nested": programs.nested,
}
SOLVERS: dict[str, Callable[[], AbstractSolver]] = {
    "exact": Exact,
    "cg": lambda: ConjugateGradient(max_iterations=50, tolerance=1e-14),
}
SOLVED = ("bilevel", "ridge", "logistic", "trilevel", "two_path", "diamond")


def error(case_of: Callable[..., programs.Case], algorithm: Callable[[], Implicit], device: torch.device) -> float:
    with device:
        case = case_of(0.05)
        program, expected = case.program(algorithm), case.reference()
    found = program.gradient(case.top)["x"]
    assert found.device == expected.device == device
    return relative_error(found, expected)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("name", CASES)
def test_reverse_products(name: str, solver: str, device: torch.device) -> None:
    assert error(CASES[name], lambda: Implicit(SOLVERS[solver]()), device) < 1e-8


@pytest.mark.parametrize("name", SOLVED)
def test_finite_differences(name: str, device: torch.device) -> None:
    assert error(CASES[name], lambda: Implicit(Exact(), product="finite_difference"), device) < 1e-5
