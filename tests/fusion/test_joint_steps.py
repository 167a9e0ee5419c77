"""Steps of several problems by few calls of a kernel have the bits of a step of each."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from mlotool.fusion.joint_steps import step_together
from mlotool.program import Problem

KINDS = {
    "sgd": [partial(torch.optim.SGD, lr=0.1, momentum=0.9)] * 3,
    "other rates": [partial(torch.optim.SGD, lr=lr, momentum=0.9) for lr in (0.1, 0.2, 0.1)],
    "no momentum": [partial(torch.optim.SGD, lr=0.1, momentum=m) for m in (0.0, 0.9, 0.0)],
    "adam": [partial(torch.optim.Adam, lr=0.1)] * 3,
    "adam and adamw": [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD],
    "without a kernel": [partial(torch.optim.RMSprop, lr=0.1), torch.optim.Adam, torch.optim.Adam],
}


def problems(kinds: list[Any], **settings: Any) -> list[Problem]:
    found = []
    for number, kind in enumerate(kinds):
        torch.manual_seed(number)
        module = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
        scheduler = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5 + 0.1 * number)
        found.append(Problem("a", module, lambda batch, **roles: None, optimizer=kind, scheduler=scheduler, **settings))
    return found


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_the_bits_are_those_of_a_step_each(kinds: list[Any], clip: float | None) -> None:
    settings = {"gradient_clip_norm": clip, "scheduler_interval": "step"}
    together, apart = problems(kinds, **settings), problems(kinds, **settings)
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        gradients = [[torch.randn(x.shape, generator=generator) for x in each.own] for each in together]
        norms = step_together([(*each, None) for each in zip(together, gradients, strict=True)])
        expected = [each.step(gradient) for each, gradient in zip(apart, gradients, strict=True)]
        for one, other in zip(norms, expected, strict=True):
            assert (one is None and other is None) or torch.equal(one, other)  # type: ignore[arg-type]
    for one, other in zip(together, apart, strict=True):
        assert one.num_steps == other.num_steps == 4
        assert all(map(torch.equal, one.own, other.own))
        assert one.optimizer.param_groups[0]["lr"] == other.optimizer.param_groups[0]["lr"]  # type: ignore[union-attr]


def test_one_that_fails_fails_alone() -> None:
    found = problems(KINDS["sgd"])
    found[1].optimizer.step = lambda *arguments: 1 / 0  # type: ignore[union-attr, method-assign, assignment]
    gradients = [[torch.ones_like(x) for x in each.own] for each in found]
    errors = step_together([(*each, None) for each in zip(found, gradients, strict=True)])
    assert [type(each) for each in errors] == [type(None), ZeroDivisionError, type(None)]
    assert [each.num_steps for each in found] == [1, 0, 1]
