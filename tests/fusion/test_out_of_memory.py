"""A group whose gradients do not fit into memory takes them in parts."""

from typing import Any

import pytest
import torch

from mlotool.config import compose
from mlotool.config.checks import build
from mlotool.fusion import stacked_gradients
from mlotool.fusion.stacked_schedule import StackedSchedule
from mlotool.program import Schedule

WORDS = ["problems.classifier.module.hidden=[8]", "problems.classifier.stream.batch_size=4"]


def schedules(count: int) -> list[Schedule]:
    return [Schedule(build(compose("plain", [f"seed={seed}", *WORDS])).program) for seed in range(count)]


def test_the_gradients_are_taken_for_fewer_members_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fused, alone = schedules(5), schedules(5)
    stack = StackedSchedule(fused)
    direct = stacked_gradients.StackedGradients._traced

    def traced(self: Any, leader: Any, batches: Any, arguments: Any, *others: Any) -> Any:
        if self.at_once > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return direct(self, leader, batches, arguments, *others)

    monkeypatch.setattr(stacked_gradients.StackedGradients, "_traced", traced)
    monkeypatch.setattr("mlotool.fusion.comparison._fastest", lambda take, before: (before(), (0.0, take()))[1])
    for _ in range(5):
        outcomes = stack.tick([True] * 5)
        expected = [schedule.tick() for schedule in alone]
    for outcome, result in zip(outcomes, expected, strict=True):
        assert isinstance(outcome, dict)
        torch.testing.assert_close(outcome["classifier"].loss, result["classifier"].loss)
    verdict = stack.verdicts["classifier"]
    assert verdict.is_fused and verdict.at_once == 2


def test_one_that_does_not_fit_alone_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = StackedSchedule(schedules(2))

    def traced(*arguments: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(stacked_gradients.StackedGradients, "_traced", traced)
    for _ in range(3):
        outcomes = stack.tick([True, True])
    assert all(isinstance(each, dict) for each in outcomes)
    assert "do not fit into memory" in stack.verdicts["classifier"].reason
