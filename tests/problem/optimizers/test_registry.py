"""A rule is all that a new optimizer needs for its steps to be differentiated, unrolled and traced."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.optim import RMSprop

from mlotool.core.errors import ConfigError
from mlotool.hypergradient import Unrolled
from mlotool.problem.optimizers.registry import RULES
from mlotool.problem.optimizers.rule import Hyperparameters, OptimizerRule, State
from tests.hypergradient.test_unrolled import BATCHES, by_differences, by_loop, flat, program, upper_values
from tests.program.test_trace import assert_close, is_traced, network, ticked

MAKE = partial(RMSprop, lr=0.1)


def _update(theta: Tensor, gradient: Tensor, state: State, hyperparameters: Hyperparameters) -> tuple[Tensor, State]:
    count = state["step"] + 1 if "step" in state else torch.ones(())
    average = state.get("square_avg", torch.zeros_like(theta))
    average = hyperparameters["alpha"] * average + (1 - hyperparameters["alpha"]) * gradient.square()
    moved = theta - hyperparameters["lr"] * gradient / (average.sqrt() + hyperparameters["eps"])
    return moved, {"step": count, "square_avg": average}


@pytest.fixture
def _with_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = OptimizerRule(_update, ("lr", "alpha", "eps"), {"square_avg": None, "step": None})
    monkeypatch.setitem(RULES, RMSprop, rule)


def test_without_a_rule_steps_are_not_differentiated() -> None:
    with pytest.raises(ConfigError, match=r"found optimizer other than Adam, AdamW, SGD with .*; expected"):
        program("loss", MAKE)


@pytest.mark.usefixtures("_with_rule")
@pytest.mark.parametrize("way", ["loss", "lr"])
@pytest.mark.parametrize("remat", [True, False])
def test_steps_of_a_new_rule_are_differentiated(way: str, remat: bool) -> None:
    built = program(way, MAKE, Unrolled(remat=remat))
    expected = by_differences(lambda values: by_loop(way, MAKE, values), upper_values(built))
    assert torch.allclose(flat(built.gradient("u", {"w": BATCHES})), expected, rtol=1e-6, atol=1e-8)


@pytest.mark.usefixtures("_with_rule")
def test_steps_of_a_new_rule_are_traced() -> None:
    make = partial(RMSprop, lr=0.01)
    traced, planned = network(optimizer=make, trace="eager"), network(optimizer=make)
    assert_close(ticked(traced), ticked(planned), 1e-9)
    assert is_traced(traced, "model")
