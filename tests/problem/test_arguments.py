"""Mistakes of a Python script are refused where they are made: each message says what was found, by its name."""

import traceback
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from mlotool import FirstOrder, Graph, Problem, Program, Stream, Unrolled
from mlotool.core.errors import ConfigError, MlotoolError
from mlotool.problem.streams.stream import SameBatch
from tests.program.small import run_ticks, sgd

DATA = TensorDataset(torch.zeros(4, 1))


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
    ({"loss": of_two}, "does not fit (missing a required argument: 'other'); expected that it is called as loss(batch"),
    ({"roles": {"net": "p"}}, "does not fit (missing a required argument: 'model'); expected that it is called as lo"),
    ({"roles": ["p"]}, "problems.p.loss.roles: found ['p']; expected problems' names by argument of the loss"),
    ({"roles": {"model": {"problem": "p", "mode": []}}}, "problems.p.loss.roles.model: found {problem: 'p', mode: "),
    ({"module": nn.Linear(2, 2, device="meta")}, "problems.p.module.weight: found a parameter on the device"),
    ({"module": nn.ParameterList([torch.eye(2).to_sparse()])}, "problems.p.module.0: found a parameter that is sparse"),
    ({"module": nn.ParameterList([torch.zeros(1).expand(5)])}, "problems.p.module.0: found a parameter whose elements"),
    ({"optimizer": lambda parameters: None}, "problems.p.optimizer: found None; expected a torch optimizer, which"),
    ({"optimizer": partial(sgd, lrr=1)}, "problems.p.optimizer: torch.optim.sgd.SGD failed: "),
    ({"hypergradient": 3}, "problems.p.hypergradient: found 3; expected a name such as 'cg', a built hypergradient"),
    ({"hypergradient": "neuman"}, "or an object. Did you mean 'neumann'? Correct the name."),
    ({"optimizer": "sdg"}, "found 'sdg'; expected one of adam, adamw, sgd, or an object. Did you mean 'sgd'?"),
    (
        {"lr": 0.1},
        "problems.p.optimizer: found a partial; expected a name or a class beside lr. Write optimizer=",
    ),
    ({"optimizer": "sgd", "lr": "0.1"}, "problems.p.lr: found '0.1'; expected a number of at least 0"),
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


def program(**given: Any) -> Program:
    return Program([problem(**given)], Graph())


def ticked(**given: Any) -> None:
    run_ticks(program(**{"stream": Stream(DATA, 4), **given}), 2)


def kept() -> Callable[..., Tensor]:
    seen: list[Tensor] = []

    def found(batch: Any, *, model: Any) -> Tensor:
        seen.append(model(batch[0]).sum())
        return seen[0].exp() if len(seen) == 1 else seen[0].detach().requires_grad_().exp()

    return found


OTHERS: dict[str, tuple[Callable[[], Any], str]] = {
    "a batch": (lambda: Stream({"input": torch.zeros(3)}, 2), "stream.dataset: found {input: a tensor of shape (3,)};"),
    "an iterator": (lambda: Stream(iter(DATA), 2), "stream.dataset: found an iterator; expected a map-style data"),
    "no graph": (lambda: Program([problem()], {}), "Program.graph: found {}; expected"),  # type: ignore[arg-type]
    "names": (lambda: program().loss(["p"]), "Unknown problem ['p']; expected one of p"),  # type: ignore[arg-type]
    "batches": (
        lambda: program().gradient("p", torch.zeros(2)),  # type: ignore[arg-type]
        "batches: found a tensor of shape (2,); expected batches by problem",
    ),
    "same batch": (lambda: SameBatch([1]), "SameBatch.stream: found [1]; expected a Stream"),  # type: ignore[arg-type]
    "a loss that is kept": (lambda: ticked(loss=kept()), "problems.p.loss: the loss does not depend on any parameter"),
    "no gradients": (torch.no_grad()(ticked), "problems.p.loss: its gradient is needed, but gradients are switched"),
    "state of a module": (
        lambda: program().load_state_dict({"p": nn.Linear(3, 4).state_dict()}),
        "state.p: found {wei",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_rest_refuses(name: str) -> None:
    make, said = OTHERS[name]
    with pytest.raises(MlotoolError) as refused:
        make()
    assert str(refused.value).startswith(said)


def of_rows(batch: Any, *, model: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch["input"]), batch["target"])


def test_a_traceback_of_the_user_s_code_ends_with_what_it_was_given() -> None:
    module, rows = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), [{"input": torch.randn(3), "target": 0}]
    with pytest.raises(ValueError, match="more than 1 value per channel") as failed:
        ticked(module=module, loss=of_rows, stream=Stream(rows, 1))
    text = "".join(traceback.format_exception(failed.value))
    assert "mlotool: problems.p.loss: tests.problem.test_arguments.of_rows (" in text
    assert "It was given batch = {input: float32 (1, 3), target: int64 (1,) from 0 to 0" in text


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
