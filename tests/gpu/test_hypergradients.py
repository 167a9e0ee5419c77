"""Hypergradients on the device: of solved programs against plain autograd, of every algorithm against the CPU."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from mlotool import EvolutionStrategies, Unrolled
from mlotool.hypergradient import AbstractSolver, ConjugateGradient, Exact, Implicit
from mlotool.program import Program, Schedule
from tests import programs
from tests.gpu.placed import CPU, follow, on_the_cpu, parameters, placed, relative_error
from tests.hypergradient.every_algorithm import EVERY, program
from tests.hypergradient.unrolled_cases import OPTIMIZERS, RATES, UPDATES
from tests.problem.test_tasks import TASKS, maml
from tests.program.small import lower_loss, pair, upper_loss

pytestmark = [
    pytest.mark.gpu,
    # A few steps of a network of forty parameters: solvers say what they think of its curvature.
    pytest.mark.filterwarnings("ignore:The .* solve at problem '(model|learner)'"),
]

TICKS = 4
"""Two steps of the upper problem."""


def tolerance(name: str) -> float:
    """Differences of losses magnify rounding errors; all else is as exact as float64."""
    return 1e-5 if name.endswith("_difference") or name == "evolution" else 1e-9


STEPS = 4


def unrolled_program(device: torch.device, optimizer: Any, hypergradient: Any) -> Program:
    """Return a unrolled_program whose upper problem moves by its hypergradient, after four steps of the lower one."""
    lower = {"optimizer": optimizer, "unroll_steps": STEPS}
    upper = {"optimizer": partial(torch.optim.SGD, lr=1.0)}
    return placed(pair(lower, upper, hypergradient=lambda: hypergradient), device)


def moved(device: torch.device, optimizer: Any, hypergradient: Any) -> tuple[Tensor, Tensor]:
    """Return where the lower problem has come to, and the hypergradient there."""
    made = unrolled_program(device, optimizer, hypergradient)
    upper, schedule = made.problems["u"].theta["x"], Schedule(made)
    before = upper.detach().clone()
    for _ in range(STEPS):
        schedule.tick()
    return made.problems["w"].theta["x"].detach(), before - upper.detach()


def by_torch(device: torch.device, name: str) -> tuple[Tensor, Tensor]:
    """Return the same by the updates of torch's optimizers, written out."""
    problems = unrolled_program(device, torch.optim.SGD, Unrolled()).problems
    x = problems["w"].theta["x"].detach().requires_grad_()
    u = problems["u"].theta["x"].detach().requires_grad_()
    state: dict[str, Tensor] = {}
    for number in range(1, STEPS + 1):
        loss = lower_loss(problems["w"].stream.next(), w=lambda x=x: x, u=lambda: u)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        x = UPDATES[name](x, slope, state, number, RATES[name])
    loss = upper_loss(problems["u"].stream.next(), w=lambda: x)
    return x.detach(), torch.autograd.grad(loss, u)[0]


@pytest.mark.parametrize("remat", [True, False], ids=["computed_again", "kept"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
@pytest.mark.parametrize("name", ["momentum", "adam", "adamw"])
def test_it_equals_plain_autograd(name: str, fused: bool, remat: bool, device: torch.device) -> None:
    optimizer = partial(OPTIMIZERS[name], lr=RATES[name], fused=fused)
    found, expected = moved(device, optimizer, Unrolled(remat=remat)), by_torch(device, name)
    assert all(tensor.device == device for tensor in (*found, *expected))
    # Adam's own rounding, of which fused kernels have another one.
    assert relative_error(found[0], expected[0]) < 1e-9
    assert relative_error(found[1], expected[1]) < 1e-8


TASKED = (
    *("unrolled", "exact", "cg", "normal_cg", "neumann", "fixed_point", "nystrom", "warm"),
    *("identity_difference", "penalty", "saba", "evolution"),
)


@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("name", TASKED)
def test_tasks_equal_the_cpu(name: str, clip: float | None, device: torch.device) -> None:
    found = []
    for where in (CPU, device):
        made = follow(placed(maml(TASKS, EVERY[name](), gradient_clip_norm=clip), where), TICKS)
        assert made.problems["learner"].theta["0.weight"].shape[0] == TASKS
        found.append((parameters(made), made.gradient("meta")))
    for expected, ours in zip(*found, strict=True):
        assert relative_error(ours, expected) < tolerance(name)


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
    whole, second = (placed(program(STATES[name]), device) for _ in range(2))
    schedules = [Schedule(each) for each in (whole, second)]
    for schedule, count in zip(schedules, (3, 1), strict=True):
        for _ in range(count):
            schedule.tick()
    second.load_state_dict(on_the_cpu(whole.state_dict()))
    schedules[1].load_state_dict(on_the_cpu(schedules[0].state_dict()))
    for schedule in schedules:
        for _ in range(3):
            schedule.tick()
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
