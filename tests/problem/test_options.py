"""Names stand for the options of conf/, and give what a recipe's node of that name gives."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from mlotool import Problem
from mlotool.config import hypergradient_options
from mlotool.config.instantiate import optimizer_factory
from mlotool.folders.documents import read_document
from mlotool.folders.files import package_dir
from mlotool.problem.options import hypergradient_of, optimizer_of

OPTIMIZERS = sorted(file.stem for file in (package_dir("conf") / "optimizer").glob("*.yaml"))


@pytest.mark.parametrize("name", sorted(hypergradient_options({"seed": 0})))
def test_a_hypergradient_by_name_is_that_of_a_recipe(name: str) -> None:
    assert hypergradient_of("p", name) == hypergradient_options({"seed": 0})[name]()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_by_name_is_that_of_a_recipe(name: str) -> None:
    node = read_document(package_dir("conf") / "optimizer" / f"{name}.yaml").data
    parameters = [nn.Parameter(torch.ones(2))]
    found: Any = optimizer_of("p", name, None)
    ours, theirs = found(parameters), optimizer_factory("problems.p.optimizer", node)(parameters)
    assert type(ours) is type(theirs)
    assert ours.param_groups == theirs.param_groups


def test_a_learning_rate_stands_beside_a_name_or_a_class() -> None:
    make = partial(Problem, "p", nn.Linear(1, 1), lambda batch, *, p: p(batch).sum(), roles={"p": "p"})
    rates = {
        given: make(optimizer=given, lr=lr).optimizer.param_groups[0]  # type: ignore[union-attr]
        for given, lr in (("sgd", 0.5), (torch.optim.SGD, 0.25), (torch.optim.Adam, None))
    }
    assert (rates["sgd"]["lr"], rates["sgd"]["momentum"]) == (0.5, 0.9)
    assert rates[torch.optim.SGD]["lr"] == 0.25
    assert rates[torch.optim.Adam]["lr"] == 1e-3
