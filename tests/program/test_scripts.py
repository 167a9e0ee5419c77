"""Mistakes of a Python script: each ends in a message that says what was found, expected and to be done."""

import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlotool import Graph, Problem, Program, Schedule, Stream
from mlotool.core.errors import ConfigError, RunError
from mlotool.core.user_code import WrongResultError

SAMPLES = [{"input": torch.randn(3), "target": torch.tensor(0), "index": each} for each in range(8)]
sgd = partial(torch.optim.SGD, lr=0.1)


def loss(batch: Any, *, model: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch["input"]), batch["target"])


def problem(**given: Any) -> Problem:
    given = {"name": "p", "module": nn.Linear(3, 4), "loss": loss, "roles": {"model": given.get("name", "p")}, **given}
    return Problem(**{"stream": Stream(SAMPLES, 4), "optimizer": sgd, **given})


def program(**given: Any) -> Program:
    return Program([problem(**given)], Graph())


def tick(**given: Any) -> None:
    schedule = Schedule(program(**given))
    schedule.tick()
    schedule.tick()


def changed(change: Callable[[nn.Linear], Any]) -> Program:
    made = problem(module=nn.Sequential(nn.Linear(3, 4)))
    change(made.module[0])  # type: ignore[index, arg-type]
    return Program([made], Graph())


def loaded(state: Any, **given: Any) -> None:
    program(**given).load_state_dict(state)


def without_gradients() -> None:
    with torch.no_grad():
        tick()


def kept() -> Callable[..., Tensor]:
    seen: list[Tensor] = []

    def found(batch: Any, *, model: Any) -> Tensor:
        seen.append(model(batch["input"]).sum())
        return seen[0].exp() if len(seen) == 1 else seen[0].detach().requires_grad_().exp()

    return found


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "a loss that is kept": (lambda: tick(loss=kept()), "problems.p.loss: the loss does not depend on any parameter"),
    "no gradients": (without_gradients, "problems.p.loss: its gradient is wanted where gradients are switched off"),
    "frozen": (lambda: changed(lambda each: each.requires_grad_(False)), "problems.p.module: its parameter '0.weight'"),
    "a parameter added": (
        lambda: changed(lambda each: each.register_parameter("extra", nn.Parameter(torch.ones(1)))),
        "problems.p.module: its parameter '0.extra' was replaced, added, removed or frozen after the problem was made",
    ),
    "state of a module": (
        lambda: loaded({"p": nn.Linear(3, 4).state_dict()}),
        "expected 'module' among its keys. Give what state_dict()",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told(name: str) -> None:
    make, said = MISTAKES[name]
    with pytest.raises((ConfigError, RunError, WrongResultError)) as refused:
        make()
    assert said in str(refused.value)


def test_a_traceback_of_the_user_s_code_ends_with_what_it_was_given() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    with pytest.raises(ValueError, match="more than 1 value per channel") as failed:
        tick(module=module, stream=Stream(SAMPLES, 1))
    text = "".join(traceback.format_exception(failed.value))
    assert "mlotool: problems.p.loss: tests.program.test_scripts.loss (" in text
    assert "It was given batch = {input: float32 (1, 3), target: int64 (1,) from 0 to 0" in text
