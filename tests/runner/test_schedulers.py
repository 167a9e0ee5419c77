"""Learning rates under every kind of scheduler, as metrics.csv shows them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR, OneCycleLR, ReduceLROnPlateau, SequentialLR, StepLR

from mlotool.core.errors import ConfigError
from mlotool.runner import RunResult
from tests.runner.test_run_config import read_metrics

Run = Callable[..., RunResult]


def warm_up(optimizer: Optimizer) -> SequentialLR:
    parts = [LinearLR(optimizer, 0.5, total_iters=5), StepLR(optimizer, 5, gamma=0.1)]
    return SequentialLR(optimizer, parts, milestones=[5])


def learning_rates(result: RunResult) -> dict[int, float]:
    return {tick: value for tick, key, value in read_metrics(result.output_dir) if key == "classifier/lr"}


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: StepLR(optimizer, 10, gamma=0.5),
        lambda optimizer: OneCycleLR(optimizer, max_lr=0.2, total_steps=40),
        warm_up,
    ],
    ids=["StepLR", "OneCycleLR", "SequentialLR"],
)
def test_a_scheduler_steps_with_each_optimizer_step(tiny_run: Run, make: Callable[[Optimizer], Any]) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1, momentum=0.9)
    scheduler, expected = make(optimizer), {}
    for step in range(1, 31):
        optimizer.step()
        scheduler.step()
        expected[step] = optimizer.param_groups[0]["lr"]
    rates = learning_rates(tiny_run(scheduler=make))
    assert rates == pytest.approx({tick: expected[tick] for tick in rates})


def test_a_scheduler_of_evaluations_steps_with_the_objective(tiny_run: Run) -> None:
    rates = learning_rates(
        tiny_run(
            {"runner.max_ticks": 50},
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-12),
            scheduler=lambda optimizer: ReduceLROnPlateau(optimizer, "max", factor=0.5, patience=0, eps=0.0),
            scheduler_interval="evaluation",
        )
    )
    # The first evaluation sets the best value; each later one is no better.
    assert rates[15] == 1e-12
    assert rates[25] == 0.5e-12
    assert rates[35] == 0.25e-12


def test_an_ordinary_scheduler_may_step_at_evaluations(tiny_run: Run) -> None:
    rates = learning_rates(
        tiny_run(scheduler=lambda optimizer: StepLR(optimizer, 1, gamma=0.5), scheduler_interval="evaluation")
    )
    assert rates == pytest.approx({5: 0.1, 10: 0.1, 15: 0.05, 20: 0.05, 25: 0.025, 30: 0.025})


@pytest.mark.parametrize("changes", [{"scheduler_interval": "step"}, {"scheduler_interval": "evaluation"}])
def test_a_plateau_needs_an_objective_and_its_interval(tiny_run: Run, changes: dict[str, str]) -> None:
    config = {"objective": None} if changes["scheduler_interval"] == "evaluation" else {}
    with pytest.raises(ConfigError, match=r"problems.classifier.scheduler: found (a )?ReduceLROnPlateau"):
        tiny_run(config, scheduler=ReduceLROnPlateau, **changes)
