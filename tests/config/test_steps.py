"""How a recipe says that a problem shapes another one's start or its optimizer, and that a problem has tasks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from omegaconf import DictConfig

from mlotool.config import build, compose
from mlotool.hypergradient import Unrolled
from mlotool.problem.streams.stream import SameBatch
from tests.config.conftest import message_of

Change = Callable[[dict[str, Any]], DictConfig]


def test_a_learned_learning_rate_is_built() -> None:
    config = compose("learned_lr", ["problems.rate.module.initial=0.5"])
    program = build(config).program
    hyperparameters = program.internals.hyperparameters("classifier")
    assert hyperparameters is not None
    assert torch.allclose(hyperparameters[0]["lr"], torch.tensor(0.5))
    assert program.problems["classifier"].node.other_uses == {"optimizer.lr": "rate"}


def test_tasks_and_their_start_are_built() -> None:
    problems = build(
        compose("maml", ["problems.learner.tasks=3", "problems.learner.stream.batch_size=3"])
    ).program.problems
    assert isinstance(problems["meta"].stream, SameBatch)
    assert isinstance(problems["learner"].hypergradient, Unrolled)
    start = dict(problems["meta"].module.named_parameters())
    assert all(len(tensor) == 3 for tensor in problems["learner"].theta.values())
    assert all(problems["learner"].theta[key].shape[1:] == start[key].shape for key in start)


@pytest.mark.parametrize(
    ("recipe", "changes", "expected"),
    [
        ("learned_lr", ["problems.classifier.optimizer.lr.problem=rat"], "unknown problem 'rat'"),
        ("learned_lr", ["~graph.upper_to_lower.rate"], "no edge says so"),
        ("learned_lr", ["hypergradient=cg"], "expected Unrolled"),
        ("maml", ["hypergradient=cg"], "problems.learner.reset_to: 'meta' shapes 'learner' through its steps"),
        ("maml", ["problems.learner.reset_to=mta"], "unknown problem 'mta'"),
        ("maml", ["problems.meta.same_batch_as=lerner"], "Did you mean 'learner'?"),
        ("maml", ["problems.learner.same_batch_as=meta"], "found 'meta' beside a stream"),
    ],
)
def test_faults(recipe: str, changes: list[str], expected: str) -> None:
    assert expected in message_of(build, compose(recipe, changes))
