"""Arguments of a wrong kind are refused where they are given, each by its name."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from mlotool import FirstOrder, Graph, Problem, Program, Stream, Unrolled
from mlotool.core.errors import ConfigError
from mlotool.problem.stream import SameBatch

DATA = TensorDataset(torch.zeros(4, 1))
sgd = partial(torch.optim.SGD, lr=0.1)


def loss(batch: Any, *, model: Any) -> Tensor:
    return model(batch[0]).square().mean()


def without_star(batch: Any, model: Any) -> Tensor:
    return model(batch[0]).square().mean()


def of_two(batch: Any, *, model: Any, other: Any) -> Tensor:
    return model(batch[0]).square().mean() + other(batch[0]).square().mean()


def problem(**given: Any) -> Problem:
    settings = {"name": "p", "module": nn.Linear(1, 1), "loss": loss, "roles": {"model": "p"}, "optimizer": sgd}
    return Problem(**{**settings, **given})


PROBLEMS: list[tuple[dict[str, Any], str]] = [
    ({"name": 3}, "Problem.name: found 3; expected a text"),
    ({"loss": None}, "problems.p.loss: found None; expected a function that is called as loss(batch, model=...)"),
    ({"roles": ["p"]}, "problems.p.loss.roles: found ['p']; expected problems' names by argument of the loss"),
    ({"roles": {"model": {"problem": "p", "mode": []}}}, "problems.p.loss.roles.model: found {problem: 'p', mode: "),
    ({"module": None}, "problems.p.module: found None; expected an nn.Module, built"),
    ({"module": nn.Linear(2, 2, device="meta")}, "problems.p.module.weight: found 'a parameter on the device"),
    ({"stream": [1, 2]}, "problems.p.stream: found [1, 2]; expected a mlotool.Stream or null"),
    ({"optimizer": "sgd"}, "problems.p.optimizer: found 'sgd'; expected a torch optimizer, or a callable"),
    ({"optimizer": lambda parameters: None}, "problems.p.optimizer: found None; expected a torch optimizer, which"),
    ({"optimizer": partial(sgd, lrr=1)}, "problems.p.optimizer: torch.optim.sgd.SGD failed: "),
    ({"scheduler": lambda optimizer: 3}, "problems.p.scheduler: found 3; expected a scheduler"),
    ({"hypergradient": "cg"}, "problems.p.hypergradient: found 'cg'; expected a built hypergradient, or null"),
    ({"unroll_steps": "3"}, "problems.p.unroll_steps: found '3'; expected a whole number of at least 1"),
]


@pytest.mark.parametrize(("given", "said"), PROBLEMS)
def test_a_problem_refuses(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        problem(**given)
    assert said in str(refused.value)


def test_a_problem_takes_what_does_as_well() -> None:
    count: Any = np.int64(2)
    made = problem(loss=without_star, unroll_steps=count, gradient_clip_norm=float("inf"), optimizer=torch.optim.Adam)
    assert made.settings.unroll_steps == 2
    assert isinstance(made.optimizer, torch.optim.Adam)
    assert problem(loss=partial(of_two, other=nn.Identity())).roles.keys() == {"model"}


STREAMS: list[tuple[Any, dict[str, Any], str]] = [
    (DATA, {"batch_size": "3"}, "Stream.batch_size: found '3'; expected a whole number of at least 1"),
    ({"input": torch.zeros(3)}, {}, "stream.dataset: found {input: a tensor of shape (3,)}; expected a map-style"),
    (DataLoader(DATA), {}, "stream.dataset: found a DataLoader; expected a map-style data set. Give its data set: "),
]


@pytest.mark.parametrize(("dataset", "given", "said"), STREAMS)
def test_a_stream_refuses(dataset: Any, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Stream(dataset, **{"batch_size": 2, **given})
    assert str(refused.value).startswith(said)


OTHERS: dict[str, tuple[Callable[[], Any], str]] = {
    "no graph": (lambda: Program([problem()], None), "Program.graph: found None; expected"),  # type: ignore[arg-type]
    "names": (
        lambda: Program([problem()], Graph()).loss(["p"]),  # type: ignore[arg-type]
        "Unknown problem ['p']; expected one of p",
    ),
    "batches": (
        lambda: Program([problem()], Graph()).gradient("p", torch.zeros(2)),  # type: ignore[arg-type]
        "batches: found a tensor of shape (2,); expected batches by problem",
    ),
    "same batch": (lambda: SameBatch([1]), "SameBatch.stream: found [1]; expected a Stream"),  # type: ignore[arg-type]
    "text": (lambda: Graph({"a": "b"}), "graph.upper_to_lower.a: found 'b'; expected a list of problems' names"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_rest_refuses(name: str) -> None:
    make, said = OTHERS[name]
    with pytest.raises(ConfigError) as refused:
        make()
    assert str(refused.value).startswith(said)


def of_both(lower: nn.Module, upper: nn.Module, **settings: Any) -> Program:
    of_lower = {"loss": of_two, "roles": {"model": "w", "other": "u"}, "hypergradient": FirstOrder(), **settings}
    problems = [problem(name="w", module=lower, **of_lower), problem(name="u", module=upper, roles={"model": "w"})]
    return Program(problems, Graph({"u": ["w"]}, {"w": ["u"]}))


def tied() -> tuple[nn.Module, nn.Module]:
    lower, upper = nn.Linear(1, 1), nn.Linear(1, 1)
    upper.weight = nn.Parameter(lower.weight.data)
    return lower, upper


SHARED: dict[str, tuple[Callable[[nn.Linear], tuple[nn.Module, nn.Module]], str, str]] = {
    "module": (lambda shared: (shared, shared), "weight", "weight"),
    "sub-module": (
        lambda shared: (nn.Sequential(shared), nn.Sequential(nn.Linear(1, 1), shared)),
        "1.weight",
        "0.weight",
    ),
    "memory": (lambda shared: tied(), "weight", "weight"),
}


@pytest.mark.parametrize("name", SHARED)
def test_a_parameter_of_two_problems_is_refused_by_name(name: str) -> None:
    make, path, other = SHARED[name]
    match = rf"^problems\.u\.module: its parameter '{path}' is the parameter '{other}' of problems\.w\.module"
    with pytest.raises(ConfigError, match=match):
        of_both(*make(nn.Linear(1, 1)))
    if name == "module":
        # Also where tasks have replaced them.
        with pytest.raises(ConfigError, match=match):
            of_both(*make(nn.Linear(1, 1)), tasks=2, hypergradient=Unrolled())


def test_frozen_parts_and_copies_may_be_shared() -> None:
    frozen, module = nn.Linear(1, 1).requires_grad_(False), nn.Linear(1, 1)
    of_both(nn.Sequential(frozen, module), nn.Sequential(frozen, deepcopy(module)))


def test_modules_that_are_shared_or_tied_are_taken() -> None:
    shared = nn.Linear(2, 2)
    tied = nn.Linear(2, 2)
    tied.weight = shared.weight
    made = Problem("p", nn.Sequential(shared, shared, tied), lambda batch: torch.zeros(()))
    assert set(made.theta) == {"0.weight", "0.bias", "2.bias"}
