import math
from typing import Any

import pytest
import torch
from torch import nn

from mlotool.core.bound_module import BoundModule
from mlotool.core.user_code import WrongResultError
from mlotool.runner.evaluation import Evaluator, FunctionMetric


class Numbers:
    """Five samples, of which a batch of two leaves one over."""

    splits = ("val",)
    num_classes = 2

    def split(self, name: str) -> list[dict[str, Any]]:
        return [{"input": torch.tensor([float(number)]), "target": number % 2} for number in range(5)]


def _mean(module: BoundModule, batch: Any) -> dict[str, Any]:
    assert not torch.is_grad_enabled()
    return {"mean": module(batch["input"]).mean(), "each": module(batch["input"])[:, 0], "always": 3}


def test_means_over_a_split_count_samples_not_batches() -> None:
    model = nn.Linear(1, 1)
    evaluator = Evaluator(model, Numbers(), [], 2, functions={"evaluate.metrics[0]": _mean})
    expected = model(torch.arange(5.0)[:, None]).mean().item()
    values = evaluator.evaluate("val")
    assert values == {"val/mean": pytest.approx(expected), "val/each": pytest.approx(expected), "val/always": 3.0}
    assert evaluator.rehearse("val") == ["val/mean", "val/each", "val/always"]
    assert evaluator.evaluate("val") == values


def test_a_value_that_is_not_finite_is_not_left_out() -> None:
    metric = FunctionMetric("key", lambda module, batch: {"x": torch.tensor([1.0, float("nan")])})
    metric.update(BoundModule(nn.Identity()), None, 2)
    assert math.isnan(metric.compute(taken=())["x"])


def test_a_mean_loss_that_is_not_finite_is_not_left_out() -> None:
    class Spoiled(nn.Module):
        """NaN for the first samples alone."""

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return torch.where(values < 2, float("nan"), values).repeat(1, 2)

    assert math.isnan(Evaluator(Spoiled(), Numbers(), ["cross_entropy"], 2).evaluate("val")["val/cross_entropy"])


@pytest.mark.parametrize(
    "result", [None, {}, {"x": torch.zeros(3)}, {"x": "y"}, {"a/b": torch.zeros(())}, {0: torch.zeros(())}]
)
def test_what_is_no_metric(result: Any) -> None:
    metric = FunctionMetric("key", lambda module, batch: result)
    with pytest.raises(WrongResultError, match="expected"):
        metric.update(BoundModule(nn.Identity()), None, 2)
