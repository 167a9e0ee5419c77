"""A saved state of another form is told with its place before anything is changed; torch's kernels would follow it."""

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from mlotool import Graph, Problem, Program, Stream
from mlotool.core.errors import ConfigError
from mlotool.program import Schedule
from mlotool.runner.checkpoint import random_state, restore_random_state
from tests.program.small import run_ticks

Change = Callable[[Any], None]


def square(batch: Tensor, *, model: Any) -> Tensor:
    return model(batch).square().mean()


def made(optimizer: Callable[..., Any] | None = None) -> Program:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    stream = Stream(torch.randn(12, 4), 4)  # type: ignore[arg-type]
    optimizer = optimizer or partial(torch.optim.Adam, lr=0.1)
    given = {"stream": stream, "optimizer": optimizer, "scheduler": partial(StepLR, step_size=3)}
    problem = Problem("p", module, square, roles={"model": "p"}, **given)
    return Program([problem], Graph())


def saved(optimizer: Callable[..., Any] | None = None, num_ticks: int = 3) -> dict[str, Any]:
    return copy.deepcopy(run_ticks(made(optimizer), num_ticks).program.state_dict())


def kept(state: Any) -> Any:
    return state["optimizer"]["state"][0]


def group(state: Any) -> Any:
    return state["optimizer"]["param_groups"][0]


CHANGES: dict[str, tuple[Change, str]] = {
    "one element": (lambda s: kept(s).update(exp_avg=torch.ones(1)), "state.0.exp_avg: found a tensor of shape (1,)"),
    "no count": (lambda s: kept(s).pop("step"), "expected 'step' among its keys"),
    "count is nan": (lambda s: kept(s).update(step=torch.tensor(math.nan)), "state.0.step: found"),
    "no parameter": (lambda s: s["optimizer"]["state"].update({99: {}}), "expected the number of a parameter, below 4"),
    "other order": (lambda s: group(s).update(params=[1, 0, 2, 3]), "param_groups.0.params: found [1, 0, 2, 3]"),
    "rate": (lambda s: group(s).update(lr="x"), "param_groups.0.lr: found 'x'; expected a number"),
    "steps": (lambda s: s.update(num_steps=-1), "num_steps: found -1; expected a whole number from 0 on"),
    "buffer": (lambda s: s["module"].update({"1.num_batches_tracked": torch.tensor(math.nan)}), "num_batches_tracked"),
    "algorithm": (lambda s: s.pop("hypergradient"), "hypergradient: found None; expected a dict"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_told_with_its_place_and_nothing_is_taken(name: str) -> None:
    change, message = CHANGES[name]
    state, program = saved(), made()
    change(state["p"])
    before = copy.deepcopy(program.state_dict())
    with pytest.raises(ConfigError) as found:
        program.load_state_dict(state)
    assert message in str(found.value)
    for key, tensor in program.problems["p"].module.state_dict().items():
        assert torch.equal(tensor, before["p"]["module"][key])


MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (MOMENTUM, "momentum_buffer"),
        (partial(torch.optim.AdamW, lr=0.1, amsgrad=True), "max_exp_avg_sq"),
        (partial(torch.optim.Adagrad, lr=0.1, fused=True), "sum"),
    ],
)
def test_what_each_optimizer_keeps_has_its_parameters_shape(kind: Callable[..., Any], name: str) -> None:
    state = saved(kind)
    made(kind).load_state_dict(state)
    kept(state["p"])[name] = torch.ones(1)
    with pytest.raises(ConfigError, match=rf"state.p.optimizer.state.0.{name}: found a tensor of shape \(1,\)"):
        made(kind).load_state_dict(state)


def test_a_state_of_other_shapes_is_taken_where_its_optimizer_keeps_such() -> None:
    kind = partial(torch.optim.Adafactor, lr=0.1)
    made(kind).load_state_dict(saved(kind))


def test_momentum_with_other_strides_makes_the_same_step() -> None:
    found = []
    for change in (Tensor.clone, lambda momentum: momentum.t().contiguous().t()):
        state, program = saved(MOMENTUM), made(MOMENTUM)
        kept(state["p"])["momentum_buffer"] = change(kept(state["p"])["momentum_buffer"])
        program.load_state_dict(state)
        run_ticks(program, 3)
        found.append(program.problems["p"].module[0].weight.detach())  # type: ignore[index]
    assert torch.equal(*found)


def test_random_states_that_would_be_read_past_their_end() -> None:
    state = random_state()
    restore_random_state(state)
    state["numpy"][2] = 10**8
    with pytest.raises(ConfigError, match="numpy: found 100000000; expected a position"):
        restore_random_state(state)


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_ticks", -1), ("num_ticks", None), ("waited", [["a", "b"]]), ("at_start", ["x"]), ("snapshots", {"p": {}})],
)
def test_counters_of_a_schedule(key: str, value: Any) -> None:
    schedule = Schedule(made())
    with pytest.raises(ConfigError, match=r"state.*: found .*; expected"):
        schedule.load_state_dict({**schedule.state_dict(), key: value})
