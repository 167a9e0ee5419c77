"""What a user changes in one of several runs counts there, and in no other one."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from mlotool import Problem, Program, Schedule
from mlotool.core.errors import RunError
from mlotool.fusion.fused_ticks import FusedTicks
from mlotool.program.guard import Guard
from tests.fusion.members import bilevel, compared, network, plain, state_difference

pytestmark = pytest.mark.usefixtures("no_clock")


def norms() -> nn.Module:
    return network(nn.BatchNorm1d(8), nn.LeakyReLU(0.1))


def first(problem: Problem) -> Any:
    return problem.module[0].weight  # type: ignore[index]


def emptied(problem: Problem) -> None:
    problem.optimizer.state[first(problem)]["momentum_buffer"] = torch.zeros_like(first(problem))  # type: ignore[union-attr]


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a mode": (lambda problem: problem.module[1].eval(), "BatchNorm1d.training has changed"),
    "an attribute": (lambda problem: setattr(problem.module[1], "momentum", 0.01), "BatchNorm1d.momentum has changed"),
    "a slope": (
        lambda problem: setattr(problem.module[2], "negative_slope", 0.5),
        "LeakyReLU.negative_slope has changed",
    ),
    "a submodule": (lambda problem: problem.module.__setitem__(3, nn.Softsign()), "Sequential.3 has changed"),
    "a forward": (lambda problem: setattr(problem.module[3], "forward", lambda x: x), "Tanh.forward has changed"),
    "a forward hook": (
        lambda problem: problem.module[0].register_forward_hook(lambda _, __, out: 2 * out),
        "has a hook",
    ),
    "a hook of a parameter": (
        lambda problem: first(problem).register_hook(lambda gradient: 2 * gradient),
        "has a hook",
    ),
    "data": (lambda problem: setattr(first(problem), "data", first(problem).data.clamp(-0.1, 0.1)), ""),
    "strides": (lambda problem: setattr(first(problem), "data", first(problem).data.t().contiguous().t()), ""),
    "momentum": (emptied, ""),
    "a rate": (lambda problem: problem.optimizer.param_groups[0].update(lr=0.01), ""),
    "statistics": (lambda problem: problem.module[1].reset_running_stats(), ""),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_one_member_counts_there(name: str) -> None:
    change, reason = CHANGES[name]
    alone, fused = ([Schedule(plain(number, norms)) for number in range(3)] for _ in range(2))
    together = FusedTicks(dict.fromkeys(range(3), "the same"))
    for number, schedule in enumerate(fused):
        together.join(number, schedule)
    for tick in range(12):
        if tick == 6:
            for schedules in (alone, fused):
                change(schedules[1].program.problems["classifier"])
        if tick % 5 == 0:
            together.begin(range(3))
        outcomes = together.tick(range(3))
        for schedule in alone:
            schedule.tick()
        assert not [each for each in outcomes.values() if isinstance(each, Exception)]
    [verdict] = together.records[0].verdicts.values()
    assert reason in verdict.reason and verdict.is_fused == (not reason)
    errors = [state_difference(*(each.program for each in pair)) for pair in zip(alone, fused, strict=True)]
    assert max(errors) < 1e-10


def test_what_a_scheduler_does_counts_in_the_next_round_of_its_tick() -> None:
    def make(number: int) -> Program:
        torch.manual_seed(number)
        module, hooks = network(), list[Any]()

        def rate(step: int) -> float:
            if hooks:
                hooks.pop().remove()
            elif number == 1 and step == 6:
                hooks.append(module[0].register_forward_hook(lambda _, __, logits: 0.7 * logits))  # type: ignore[index]
            return 1.0

        scheduler = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=rate)
        return bilevel(number, lambda: module, scheduler=scheduler, scheduler_interval="step")

    found = compared(make)
    assert "has a hook" in found.reasons[0]
    assert found.error < 1e-10


def test_a_comparison_does_not_hide_what_had_changed_when_a_member_left() -> None:
    programs = [plain(number, norms) for number in range(3)]
    guard = Guard([each.engine.problems for each in programs])
    programs[1].problems["classifier"].module[1].eval()  # type: ignore[index]
    guard.drop(0)
    guard.settle()
    assert "BatchNorm1d.training" in (guard.change() or "")
    assert guard.change() is None


def test_a_frozen_parameter_ends_its_run_alone() -> None:
    schedules = [Schedule(plain(number)) for number in range(3)]
    together = FusedTicks(dict.fromkeys(range(3), "the same"))
    for number, schedule in enumerate(schedules):
        together.join(number, schedule)
    for tick in range(8):
        if tick == 5:
            first(schedules[1].program.problems["classifier"]).requires_grad_(False)
        outcomes = together.tick(range(3))
        if tick >= 5:
            break
    assert [type(each) for each in outcomes.values()] == [dict, RunError, dict]
    assert "'0.weight' was replaced, added, removed or frozen" in str(outcomes[1])


def by_numpy(batch: Mapping[str, Tensor], *, model: Any) -> Tensor:
    logits = model(batch["input"])
    largest = float(numpy.median(logits.detach().numpy()))
    return functional.cross_entropy(logits, batch["target"]) + 0.01 * largest * logits.square().mean()


class Noisy:
    def __init__(self) -> None:
        self.random = numpy.random.default_rng(0)

    def __call__(self, batch: Mapping[str, Tensor], *, model: Any) -> Tensor:
        return functional.cross_entropy(model(batch["input"]) + 0.01 * self.random.random(), batch["target"])


LOSSES: dict[str, tuple[Callable[[], Any], str]] = {
    "numpy": (lambda: by_numpy, "takes values out of torch"),
    "a generator of numpy": (Noisy, "gives other values each time (Generator)"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_is_more_than_a_function_of_tensors_is_taken_one_by_one(name: str) -> None:
    make, reason = LOSSES[name]
    found = compared(lambda number: plain(number, loss=make()))
    assert found.reasons and reason in found.reasons[0]
    assert found.error < 1e-12
