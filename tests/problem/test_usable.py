"""Modules that no problem can train are refused by name when the problem is made."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from mlotool import Problem
from mlotool.core.errors import ConfigError


def with_parameter(make: Callable[[], nn.Parameter]) -> nn.Module:
    module = nn.Linear(2, 2)
    module.extra = make()
    return module


def holding_itself() -> nn.Module:
    outer = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
    outer[1].add_module("me", outer)
    return outer


MODULES: dict[str, tuple[Callable[[], Any], str]] = {
    "none": (lambda: None, "found None; expected an nn.Module, built"),
    "a class": (lambda: nn.Linear, "expected an nn.Module, built"),
    "itself": (holding_itself, "Sequential holds itself, as '1.me'"),
    "meta": (lambda: nn.Linear(2, 2, device="meta"), "'weight' of Linear is on the device 'meta'"),
    "sparse": (lambda: with_parameter(lambda: nn.Parameter(torch.eye(2).to_sparse())), "'extra' of Linear is sparse"),
    "expanded": (
        lambda: with_parameter(lambda: nn.Parameter(torch.zeros(1).expand(3))),
        "'extra' of Linear has elements that share memory",
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_that_cannot_be_trained_is_refused(name: str) -> None:
    make, said = MODULES[name]
    with pytest.raises(ConfigError, match=r"^problems\.p\.module: ") as refused:
        Problem("p", make(), lambda batch: torch.zeros(()))
    assert said in str(refused.value)


def test_modules_that_are_shared_or_tied_are_taken() -> None:
    shared = nn.Linear(2, 2)
    tied = nn.Linear(2, 2)
    tied.weight = shared.weight
    assert set(Problem("p", nn.Sequential(shared, shared, tied), lambda batch: torch.zeros(())).theta) == {
        "0.weight",
        "0.bias",
        "2.bias",
    }
