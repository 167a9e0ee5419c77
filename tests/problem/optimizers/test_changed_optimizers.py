"""Other parameters than a problem was made with are refused in the next step; other changes of a user's count in it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from mlotool import Graph, Problem, Program, Schedule, Stream
from mlotool.core.errors import RunError

SAMPLES = [(torch.full((3,), 0.1 * number), torch.tensor(number % 2)) for number in range(8)]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def loss(batch: Any, *, model: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def scheduled(module: nn.Module, trace: str | None = None) -> Schedule:
    settings: dict[str, Any] = {"stream": Stream(SAMPLES, 4), "optimizer": partial(torch.optim.SGD, lr=0.05)}
    problem = Problem("p", module, loss, roles={"model": "p"}, **settings)
    return Schedule(Program([problem], Graph(), trace=trace))


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "frozen": (lambda model: model[0].requires_grad_(False), "0.weight"),
    "replaced": (lambda model: setattr(model[0], "bias", nn.Parameter(torch.zeros(4))), "0.bias"),
    "parametrized": (lambda model: nn.utils.parametrizations.weight_norm(model[0]), "0.weight"),
    "removed": (lambda model: model.__delitem__(2), "2.weight"),
}


@pytest.mark.parametrize("trace", [None, "eager"])
@pytest.mark.parametrize("name", REFUSED)
def test_other_parameters_are_refused_where_they_come(name: str, trace: str | None) -> None:
    change, parameter = REFUSED[name]
    schedule = scheduled(model := network(), trace)
    schedule.tick()
    schedule.tick()
    change(model)
    with pytest.raises(RunError, match=rf"problems\.p\.module: its parameter '{parameter}' was replaced"):
        schedule.tick()


def test_an_unfrozen_parameter_is_refused() -> None:
    model = network()
    model[0].requires_grad_(False)
    schedule = scheduled(model)
    schedule.tick()
    model[0].requires_grad_(True)
    with pytest.raises(RunError, match=r"'0\.weight' was replaced, added"):
        schedule.tick()
