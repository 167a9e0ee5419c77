"""Gradients through recorded steps of several runs as one program are those of each run alone, in float64."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlotool import Graph, LossOutput, Problem, Program, Stream, Unrolled
from mlotool.problem.trajectory import KeepEvery
from mlotool.program.trace import MOST_TRACES
from tests.fusion.members import Blobs, bilevel, compared, network, plain_loss
from tests.fusion.test_exact_members import check, cosine, stepping

pytestmark = pytest.mark.usefixtures("no_clock")

SGD, ADAM, ADAMW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
UNROLLS: dict[str, Callable[[int], dict[str, Any]]] = {
    "kept": lambda k: {},
    "from the start": lambda k: {"reset_to": "initial"},
    "truncated": lambda k: {"hypergradient": Unrolled(horizon=2), "unroll_steps": 4},
    "budgeted": lambda k: {"hypergradient": Unrolled(remat="auto")},
    "warm-up": lambda k: {"warmup_steps": 4},
    "accumulated": lambda k: {"accumulate_batches": 2},
    "clipped": lambda k: {"gradient_clip_norm": 0.5},
    "look-ahead": lambda k: {"roll_back": True},
    "statistics": lambda k: {"module": lambda: network(nn.BatchNorm1d(8))},
    "plain steps": lambda k: {"optimizer": partial(SGD, lr=0.1)},
    "nesterov": lambda k: {"optimizer": partial(SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1)},
    "adam": lambda k: {"optimizer": partial(ADAM, lr=0.01, weight_decay=0.1)},
    "amsgrad": lambda k: {"optimizer": partial(ADAMW, lr=0.01, amsgrad=True), "reset_to": "initial"},
    "rates": lambda k: {"optimizer": partial(SGD, lr=[0.01, 0.1, 0.3][k], momentum=[0.3, 0.5, 0.9][k])},
    "decays": lambda k: {"optimizer": partial(SGD, lr=0.1, weight_decay=[0.0, 0.1, 0.5][k])},
    "numbers of adam": lambda k: {
        "optimizer": partial(ADAM, lr=[0.01, 0.02, 0.03][k], betas=([0.8, 0.9, 0.7][k], 0.95), eps=[1e-8, 1e-4, 0.1][k])
    },
    "schedules": lambda k: {"scheduler": [None, stepping, cosine][k], "scheduler_interval": "step"},
}


def unrolled(seed: int, **settings: Any) -> Program:
    return bilevel(seed, **{"hypergradient": Unrolled(), "unroll_steps": 3, **settings})


@pytest.mark.slow
@pytest.mark.parametrize("setting", UNROLLS)
def test_recorded_steps_are_arguments(setting: str) -> None:
    check(compared(lambda k: unrolled(k, **UNROLLS[setting](k)), ticks=14))


def test_rates_that_move_are_arguments_of_one_program() -> None:
    # More unrolls than there may be programs.
    check(compared(lambda k: unrolled(k, scheduler=stepping, scheduler_interval="step"), ticks=3 * MOST_TRACES + 6))


class Rate(nn.Module):
    """A learning rate, as its logarithm."""

    def __init__(self) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.tensor(-2.0))

    def forward(self) -> Tensor:
        return self.log.exp()


def shaped(seed: int, upper: nn.Module, optimizer: Any, **settings: Any) -> Program:
    """Return a program in which an upper problem, "shaper", gives what `settings` say."""
    torch.manual_seed(seed)
    lower = Problem(
        "classifier", network(), plain_loss, roles={"model": "classifier"}, optimizer=optimizer,
        stream=Stream(Blobs(40, seed), 8, seed=seed), hypergradient=Unrolled(), unroll_steps=2, **settings,
    )  # fmt: skip
    above = Problem(
        "shaper", upper.double(), plain_loss, roles={"model": "classifier"},
        stream=Stream(Blobs(16, seed + 9), 8, seed=seed), optimizer=partial(ADAM, lr=0.1),
    )  # fmt: skip
    return Program([above, lower], Graph({"shaper": ["classifier"]}, {"classifier": ["shaper"]}))


@pytest.mark.parametrize("optimizer", [partial(SGD, lr=0.1, momentum=0.9), partial(ADAM, lr=0.1)], ids=["sgd", "adam"])
def test_a_rate_that_another_problem_gives(optimizer: Any) -> None:
    check(compared(lambda k: shaped(k, Rate(), optimizer, optimizer_roles={"lr": "shaper"})))


@pytest.mark.parametrize("optimizer", [partial(SGD, lr=0.1), partial(ADAMW, lr=0.1)], ids=["sgd", "adamw"])
def test_a_start_that_another_problem_gives(optimizer: Any) -> None:
    check(compared(lambda k: shaped(k, network(), optimizer, reset_to="shaper")))


@pytest.mark.filterwarnings("always:problems.weights.loss")
def test_a_hypergradient_of_zero_is_found_by_each_run() -> None:
    # Plain steps have a part that moves with the weights in the derivative of their gradients alone.
    plain_steps = partial(SGD, lr=0.1)
    with pytest.warns(UserWarning, match="the hypergradient of 'weights' was exactly 0 at 3 steps") as warned:
        found = compared(
            lambda k: unrolled(k, hypergradient=Unrolled(second_order=False), optimizer=plain_steps), ticks=14
        )
    check(found)
    assert len(warned) == 6


APART: dict[str, tuple[str, Callable[[int], dict[str, Any]]]] = {
    "forward mode": ("takes tangents", lambda k: {"hypergradient": Unrolled(product="forward")}),
    "graphs": ("keeps the graphs of the steps", lambda k: {"hypergradient": Unrolled(remat=False)}),
    "checkpoints": ("taken again", lambda k: {"hypergradient": Unrolled(trajectory=KeepEvery(2))}),
    "kinds": ("differ in kind or clipping", lambda k: {"optimizer": partial([SGD, ADAM, SGD][k], lr=0.01)}),
    "flags": (
        "differ in nesterov",
        lambda k: {"optimizer": partial(SGD, lr=0.1, momentum=0.9, nesterov=[True, False, True][k])},
    ),
    "momentum": ("keep different tensors", lambda k: {"optimizer": partial(SGD, lr=0.1, momentum=[0.0, 0.9, 0.9][k])}),
    "noise": ("random", lambda k: {"module": lambda: network(nn.Dropout(0.3))}),
}


@pytest.mark.parametrize("setting", APART)
def test_what_is_left_to_the_plans(setting: str) -> None:
    reason, settings = APART[setting]
    found = compared(lambda k: unrolled(k, **settings(k)), ticks=8)
    assert reason in found.verdicts["weights"].reason
    assert found.error < 1e-9 and not found.failures


def two_losses(batch: Mapping[str, Tensor], *, model: Any, weigher: Any, below: Any) -> LossOutput:
    logits = model(batch["input"])
    losses = nn.functional.cross_entropy(logits + below(batch["input"]), batch["target"], reduction="none")
    return LossOutput((losses * weigher(batch["target"])).mean(), {})


def test_steps_that_read_a_lower_problem_are_left_to_the_plans() -> None:
    def make(k: int) -> Program:
        classifier = Problem(
            "classifier", network(), two_losses, roles={"model": "classifier", "weigher": "weights", "below": "bottom"},
            stream=Stream(Blobs(40, k), 8, seed=k), optimizer=partial(SGD, lr=0.1), hypergradient=Unrolled(),
            unroll_steps=3,
        )  # fmt: skip
        bottom = Problem(
            "bottom", network(), plain_loss, roles={"model": "bottom"}, stream=Stream(Blobs(40, k + 50), 8, seed=k),
            optimizer=partial(SGD, lr=0.1),
        )  # fmt: skip
        graph = Graph({"weights": ["classifier"]}, {"classifier": ["weights"], "bottom": ["classifier"]})
        return Program([unrolled(k).problems["weights"], classifier, bottom], graph)

    found = compared(make, ticks=8)
    assert "read other problems" in found.verdicts["weights"].reason
    assert found.error < 1e-9 and not found.failures
