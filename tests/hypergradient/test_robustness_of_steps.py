"""Unrolled steps with parameter groups and schedulers, against torch loops; and solutions that read others."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim import lr_scheduler as rates

from mlotool.hypergradient import Exact, Implicit, Unrolled
from mlotool.program import AbstractHypergradient, Graph, Problem, Program, Schedule
from tests.hypergradient.test_unrolled import Pair, by_differences, fit, goal, lower_loss
from tests.hypergradient.two_levels import two_levels
from tests.program.small import numbers, samples
from tests.programs import Point

BATCH = samples(4, 1)
STEPS = 3
U = numbers(0.1, 0.2, -0.4)

Make = Callable[[Sequence[Tensor]], Optimizer]


def two_groups(kind: type[Optimizer], first: dict[str, Any], second: dict[str, Any], **shared: Any) -> Make:
    def make(parameters: Any) -> Optimizer:
        weight, bias = parameters
        return kind([{"params": [weight], **first}, {"params": [bias], **second}], **shared)

    return make


OPTIMIZERS: dict[str, Make] = {
    "sgd": two_groups(
        SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.3}, {"lr": 0.03, "nesterov": True}, momentum=0.5
    ),
    "adam": two_groups(Adam, {"lr": 0.1, "betas": (0.5, 0.9)}, {"lr": 0.02, "weight_decay": 0.5}),
    "adamw": two_groups(AdamW, {"lr": 0.1, "weight_decay": 0.5}, {"lr": 0.02, "weight_decay": 0.0}),
}  # fmt: skip
sgd: Make = partial(SGD, lr=0.1, momentum=0.5)


def chained(optimizer: Optimizer) -> Any:
    return rates.ChainedScheduler([rates.ExponentialLR(optimizer, 0.9), rates.StepLR(optimizer, 2, 0.5)])


def sequential(optimizer: Optimizer) -> Any:
    parts = [rates.LinearLR(optimizer, 0.5, total_iters=2), rates.StepLR(optimizer, 1, 0.5)]
    return rates.SequentialLR(optimizer, parts, milestones=[2])


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "lambda": partial(rates.LambdaLR, lr_lambda=lambda step: 1 / (1 + step)),
    "exponential": partial(rates.ExponentialLR, gamma=0.7),
    "cosine": partial(rates.CosineAnnealingLR, T_max=7),
    "one_cycle": partial(rates.OneCycleLR, max_lr=0.2, total_steps=12),
    "cyclic": partial(rates.CyclicLR, base_lr=0.02, max_lr=0.2, step_size_up=2, cycle_momentum=True),
    "sequential": sequential,
    "chained": chained,
}


def program(optimizer: Make, scheduler: Any = None, **settings: Any) -> Program:
    lower = Pair(), lambda batch, **roles: lower_loss(BATCH, **roles)
    upper = Point(U), lambda batch, *, w, u: goal(w()) + u().square().sum()
    # It stands still, so that the loop beside it needs no upper step.
    still = {"optimizer": partial(SGD, lr=0.0)}
    settings |= {"optimizer": optimizer, "scheduler": scheduler, "unroll_steps": STEPS}
    return two_levels(lower, upper, Unrolled(), of_upper=still, **settings)


def loop(
    make: Make, schedule: Any, num_steps: int, values: Tensor, *, after: Callable[[Any], None] | None = None
) -> Tensor:
    """Return the upper loss after steps of which the last `STEPS` are taken at `values`."""
    theta = list(Pair().parameters())
    optimizer = make(theta)
    scheduler = None if schedule is None else schedule(optimizer)
    for number in range(num_steps):
        optimizer.zero_grad()
        fit(theta, values if number >= num_steps - STEPS else U, BATCH).backward()
        optimizer.step()
        if after is not None:
            after(scheduler)
        elif scheduler is not None:
            scheduler.step()
    return (goal(theta) + values.square().sum()).detach()


def after_ticks(built: Program, num_ticks: int, after: Callable[[Any], None] | None = None) -> Tensor:
    """Return the upper gradient over the last unroll."""
    schedule = Schedule(built)
    for _ in range(num_ticks):
        schedule.tick()
        if after is not None:
            after(built.problems["w"].scheduler)
    return built.gradient("u")["x"]


def agree(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_parameter_group_has_its_own_settings(name: str) -> None:
    make = OPTIMIZERS[name]
    assert agree(after_ticks(program(make), 6), by_differences(partial(loop, make, None, 6), U))


@pytest.mark.parametrize("name", SCHEDULERS)
def test_each_step_has_the_rate_that_it_was_taken_with(name: str) -> None:
    schedule = SCHEDULERS[name]
    assert agree(after_ticks(program(sgd, schedule), 6), by_differences(partial(loop, sgd, schedule, 6), U))


@pytest.mark.parametrize("name", ["one_cycle", "sequential", "cosine"])
def test_schedulers_with_groups_and_adamw(name: str) -> None:
    """OneCycleLR turns AdamW's first beta where others turn the momentum."""
    make, schedule = OPTIMIZERS["adamw"], SCHEDULERS[name]
    assert agree(after_ticks(program(make, schedule), 6), by_differences(partial(loop, make, schedule, 6), U))


@pytest.mark.parametrize("name", ["one_cycle", "cyclic"])
def test_the_records_hold_rate_and_momentum(name: str) -> None:
    built = program(sgd, SCHEDULERS[name])
    schedule, used = Schedule(built), []
    for _ in range(2 * STEPS):
        group = built.problems["w"].optimizer.param_groups[0]
        used.append((group["lr"], group["momentum"]))
        schedule.tick()
    found = [
        (each["lr"], each["momentum"])
        for record in built.problems["w"].trajectory
        for each in record.hyperparameters[:1]
    ]
    assert found == used[-STEPS:]
    assert len(set(found)) > 1


def test_a_plateau_stepped_by_hand() -> None:
    make: Callable[[Optimizer], Any] = lambda optimizer: rates.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)  # noqa: E731
    worse: Callable[[Any], None] = lambda scheduler: scheduler.step(1.0)  # noqa: E731
    built = program(sgd, make, scheduler_interval="evaluation")
    expected = by_differences(partial(loop, sgd, make, 6, after=worse), U)
    assert agree(after_ticks(built, 6, worse), expected)
    assert built.problems["w"].optimizer.param_groups[0]["lr"] < 0.01


def test_a_rate_that_is_a_tensor_is_recorded_by_value() -> None:
    """Schedulers fill such a rate in place."""

    def make(parameters: Sequence[Tensor]) -> Optimizer:
        return SGD(parameters, lr=torch.tensor(0.1, dtype=torch.float64))

    schedule = SCHEDULERS["exponential"]
    assert agree(after_ticks(program(make, schedule), 6), by_differences(partial(loop, make, schedule, 6), U))


H = torch.diag(numbers(1.0, 2.0, 1.5))


def low(w: Tensor, u: Tensor) -> Tensor:
    return 0.5 * (w - torch.sin(u)) @ H @ (w - torch.sin(u)) + 0.1 * (w**4).sum()


def middle(v: Tensor, w: Tensor, u: Tensor) -> Tensor:
    return 0.5 * (v - w).square().sum() + 0.2 * (w * v**2 * u).sum() + 0.1 * (v**4).sum()


def top(v: Tensor, w: Tensor, u: Tensor) -> Tensor:
    return (v - 0.3).square().sum() + (w * v).sum() + 0.5 * u.square().sum()


def chain(mid: AbstractHypergradient, low_steps: int, mid_steps: int) -> Program:
    """Return low -> mid -> top, where top shapes both and reads both, and low's steps are unrolled."""
    optimizer = partial(SGD, lr=0.1, momentum=0.5)
    roles = {name: name for name in "wvu"}
    call: Callable[..., Any] = lambda f, batch, **given: f(**{key: role() for key, role in given.items()})  # noqa: E731
    problems = [
        Problem("w", Point(numbers(0.5, -0.3, 0.8)), partial(call, low), roles={"w": "w", "u": "u"},
                optimizer=optimizer, unroll_steps=low_steps, hypergradient=Unrolled()),
        Problem("v", Point(numbers(0.2, 0.4, -0.1)), partial(call, middle), roles=roles,
                optimizer=optimizer, unroll_steps=mid_steps, hypergradient=mid),
        Problem("u", Point(U), partial(call, top), roles=roles, optimizer=partial(SGD, lr=1.0)),
    ]  # fmt: skip
    return Program(problems, Graph({"u": ["w", "v"]}, {"w": ["v", "u"], "v": ["u"]}))


class Steps:
    """SGD with momentum, written out and differentiable."""

    def __init__(self, start: Tensor) -> None:
        self.x, self.buffer = start, torch.zeros_like(start)

    def take(self, loss: Callable[[Tensor], Tensor]) -> None:
        x = self.x if self.x.requires_grad else self.x.requires_grad_()
        slope = torch.autograd.grad(loss(x), x, create_graph=True)[0]
        self.buffer = 0.5 * self.buffer + slope
        self.x = x - 0.1 * self.buffer


@pytest.mark.parametrize("low_steps", [1, 3])
def test_unrolled_over_another_unrolled_solution(low_steps: int) -> None:
    """At the tick where middle and top both step, the top's gradient passes through low's recorded steps."""
    built = chain(Unrolled(), low_steps, 1)
    schedule, u = Schedule(built), U.clone().requires_grad_()
    w, v = Steps(numbers(0.5, -0.3, 0.8)), Steps(numbers(0.2, 0.4, -0.1))
    for _ in range(low_steps):
        schedule.tick()
        w.take(lambda x: low(x, u))
    v.take(lambda x: middle(x, w.x, u))
    assert built.problems["u"].num_steps == 1
    moved = U - built.problems["u"].module.x.detach()
    assert agree(moved, torch.autograd.grad(top(v.x, w.x, u), u)[0])


def test_an_implicit_middle_problem_over_an_unrolled_one() -> None:
    """At the tick where middle and top both step, the top's gradient passes through low's recorded steps."""
    steps = 3
    built = chain(Implicit(Exact()), steps, 1)
    schedule, u = Schedule(built), U.clone().requires_grad_()
    w, v = Steps(numbers(0.5, -0.3, 0.8)), Steps(numbers(0.2, 0.4, -0.1))
    for _ in range(steps):
        schedule.tick()
        w.take(lambda x: low(x, u))
    v.take(lambda x: middle(x, w.x.detach(), U))
    point = v.x.detach().requires_grad_()
    slope = torch.autograd.grad(middle(point, w.x, u), point, create_graph=True)[0]
    hessian = torch.stack([torch.autograd.grad(each, point, retain_graph=True)[0] for each in slope])
    # One Newton step from the current point has the implicit derivative there.
    solution = point.detach() - torch.linalg.solve(hessian.detach(), slope - slope.detach())
    expected = torch.autograd.grad(top(solution, w.x, u), u)[0]
    assert agree(U - built.problems["u"].module.x.detach(), expected)
