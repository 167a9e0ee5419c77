"""Collected steps: means at a flush, and the first bad loss."""

import math

import pytest
import torch

from mlotool.core.errors import NonFiniteLossError
from mlotool.program import StepResult
from mlotool.runner.values import Window


def step(loss: float, **metrics: float) -> StepResult:
    return StepResult(torch.tensor(loss), {key: torch.tensor(value) for key, value in metrics.items()})


def test_a_flush_gives_means_over_the_window_and_begins_the_next() -> None:
    window = Window()
    window.append({"lower": step(1.0, accuracy=0.5)})
    window.append({"lower": step(2.0, accuracy=1.0), "upper": step(5.0)})
    assert window.flush() == {"lower/loss": 1.5, "lower/accuracy": 0.75, "upper/loss": 5.0}
    assert window.flush() == {}


def test_the_first_bad_loss_is_named() -> None:
    window = Window(num_ticks=100)
    window.append({"lower": step(1.0)})
    window.check()
    window.append({"lower": step(1.0), "upper": step(math.inf)})
    window.append({"lower": step(math.nan)})
    with pytest.raises(NonFiniteLossError, match="'upper' became inf at tick 102"):
        window.check()


def test_ticks_go_on_counting_after_a_flush() -> None:
    window = Window()
    for _ in range(3):
        window.append({"lower": step(1.0)})
    window.flush()
    window.append({"lower": step(math.nan)})
    with pytest.raises(NonFiniteLossError, match="at tick 4"):
        window.flush()


def test_losses_of_one_element_are_losses() -> None:
    window = Window()
    window.append({"lower": StepResult(torch.ones(1), {}), "upper": StepResult(torch.tensor(2.0).double(), {})})
    assert window.flush() == {"lower/loss": 1.0, "upper/loss": 2.0}
