"""What a user changes in one of several runs counts there alone; what does not fit into memory is taken in parts."""

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
from mlotool.fusion import stacked_gradients
from tests.fusion.members import bilevel, compared, joined, network, plain


def test_the_gradients_are_taken_for_fewer_members_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    direct = stacked_gradients.StackedGradients._traced

    def traced(self: Any, *arguments: Any) -> Any:
        if self.at_once > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return direct(self, *arguments)

    monkeypatch.setattr(stacked_gradients.StackedGradients, "_traced", traced)
    found = compared(plain, 5, 5)
    verdict = found.verdicts["classifier"]
    assert verdict.is_fused and verdict.at_once == 2
    assert found.error < 1e-12 and not found.failures


def test_one_that_does_not_fit_alone_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def traced(*arguments: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(stacked_gradients.StackedGradients, "_traced", traced)
    found = compared(plain, 2, 3)
    assert "do not fit into memory" in found.reasons[0]
    assert found.error == 0 and not found.failures


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
    done = 6, lambda program: change(program.problems["classifier"])
    found = compared(lambda k: plain(k, norms), 2, 9, change=done)
    assert reason in " ".join(found.reasons) and bool(found.reasons) == bool(reason)
    assert found.error < 1e-10 and not found.failures


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

    found = compared(make, ticks=8)
    assert "has a hook" in found.reasons[0]
    assert found.error < 1e-10


def test_a_frozen_parameter_ends_its_run_alone() -> None:
    schedules = [Schedule(plain(number)) for number in range(3)]
    together = joined(schedules)
    for _ in range(5):
        together.tick(range(3))
    first(schedules[1].program.problems["classifier"]).requires_grad_(False)
    outcomes = together.tick(range(3))
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
