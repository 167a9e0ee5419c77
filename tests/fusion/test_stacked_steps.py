"""Steps of several problems by one call of a kernel have the bits of a step of each."""

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from torch import nn

from mlotool.fusion import stacked_schedule
from mlotool.fusion.stacked_gradients import Stacked
from mlotool.fusion.stacked_schedule import StackedSteps
from mlotool.problem.optimizers.optimizer_step import take_steps
from mlotool.program import Problem

KINDS = {
    "sgd": [partial(torch.optim.SGD, lr=0.1, momentum=0.9)] * 3,
    "other rates": [partial(torch.optim.SGD, lr=lr, momentum=0.9) for lr in (0.1, 0.2, 0.1)],
    "no momentum": [partial(torch.optim.SGD, lr=0.1, momentum=m) for m in (0.0, 0.9, 0.0)],
    "adam": [partial(torch.optim.Adam, lr=0.1)] * 3,
    "adam and adamw": [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD],
    "amsgrad": [partial(torch.optim.AdamW, lr=0.1, amsgrad=True, weight_decay=0.1)] * 3,
    "without a kernel": [partial(torch.optim.RMSprop, lr=0.1), torch.optim.Adam, torch.optim.Adam],
}


GAMMAS = (0.5, 0.6, 0.7)


def problems(kinds: list[Any], gammas: Sequence[float] = GAMMAS, **settings: Any) -> list[Problem]:
    found = []
    for number, (kind, gamma) in enumerate(zip(kinds, gammas, strict=True)):
        torch.manual_seed(number)
        # Of its parameters (16, 7) fills vector registers, the others do not.
        module = nn.Sequential(nn.Linear(7, 16), nn.Linear(16, 3))
        scheduler = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=gamma)
        found.append(Problem("a", module, lambda batch, **roles: None, optimizer=kind, scheduler=scheduler, **settings))
    return found


class Pair:
    """Problems that step as rows of one tensor each, and the same ones apart."""

    def __init__(self, kinds: list[Any], **settings: Any) -> None:
        self.together, self.apart = problems(kinds, **settings), problems(kinds, **settings)
        own = zip(*[each.own for each in self.together], strict=True)
        self.parameters = [torch.stack([each.detach() for each in members]) for members in own]
        for number, problem in enumerate(self.together):
            for parameter, whole in zip(problem.own, self.parameters, strict=True):
                parameter.data = whole[number]
        self.steps = StackedSteps(self.together, count().__next__)
        self.generator = torch.Generator().manual_seed(0)

    def step(self, numbers: Sequence[int] = (0, 1, 2)) -> None:
        """Take a step of some of them."""
        gradient = [torch.randn(each.shape, generator=self.generator) for each in self.parameters]
        norms = self.steps([*numbers], Stacked([*gradient], torch.zeros(3), {}), [None] * len(numbers))
        for number, norm in zip(numbers, norms, strict=True):
            expected = self.apart[number].step([each[number] for each in gradient])
            assert (norm is None and expected is None) or torch.equal(norm, expected)  # type: ignore[arg-type]
            self.compare(self.together[number], self.apart[number])

    def compare(self, one: Problem, other: Problem) -> None:
        """Compare all that a step changes, bit by bit."""
        assert one.num_steps == other.num_steps
        assert all(map(torch.equal, one.own, other.own))
        kept, expected = one.optimizer_state(), other.optimizer_state()
        assert [each.keys() for each in kept] == [each.keys() for each in expected]
        for state, wanted in zip(kept, expected, strict=True):
            assert all(torch.equal(state[name], wanted[name]) for name in wanted)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of groups in each call of kernels."""
    found: list[int] = []

    def counted(steps: Any) -> None:
        found.append(len(steps))
        take_steps(steps)

    monkeypatch.setattr(stacked_schedule, "take_steps", counted)
    return found


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_rows_of_one_tensor_step_as_each_by_itself(kinds: list[Any], calls: list[int]) -> None:
    pair = Pair(kinds, scheduler_interval="evaluation")
    for _ in range(3):
        pair.step()
    # The first step is the optimizers' own; of each kind of settings one call steps all that have it.
    has_kernels = kinds is not KINDS["without a kernel"]
    num_kinds = len({repr(kind) for kind in kinds})
    assert calls == ([num_kinds] * 2 if has_kernels else [])
    for numbers in ([0, 2], [0, 2], [1], [0, 1, 2]):
        pair.step(numbers)
    pair.steps.drop(1)
    pair.step([0, 2])


def test_clipping_and_one_that_fails(calls: list[int]) -> None:
    pair = Pair(KINDS["sgd"], scheduler_interval="evaluation", gradient_clip_norm=0.5)
    for _ in range(3):
        pair.step()
    pair = Pair(KINDS["sgd"], scheduler_interval="evaluation")
    pair.together[1].optimizer.step = lambda *arguments: 1 / 0  # type: ignore[union-attr, method-assign, assignment]
    gradient = [torch.ones_like(each) for each in pair.parameters]
    errors = pair.steps([0, 1, 2], Stacked([*gradient], torch.zeros(3), {}), [None] * 3, [nullcontext()] * 3)
    assert [type(each) for each in errors] == [type(None), ZeroDivisionError, type(None)]
    assert [each.num_steps for each in pair.together] == [1, 0, 1]


def test_rates_that_become_others(calls: list[int]) -> None:
    settings: dict[str, Any] = {"scheduler_interval": "step"}
    pair = Pair(KINDS["adam"], gammas=(0.5, 0.5, 0.5), **settings)
    for _ in range(4):
        pair.step()
    assert calls == [1, 1, 1]
    pair = Pair(KINDS["adam"], **settings)
    for _ in range(4):
        pair.step()
    assert calls[3:] == [3, 3, 3]
    # States that are put back.
    kept = [copy.deepcopy(each[1].state_dict()) for each in (pair.together, pair.apart)]
    pair.step()
    for each, state in zip((pair.together, pair.apart), kept, strict=True):
        each[1].load_state_dict(state)
    for number, whole in enumerate(pair.parameters):
        whole[1] = pair.apart[1].own[number]
    for _ in range(3):
        pair.step()
