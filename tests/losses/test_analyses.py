import pytest
import torch
from torch import nn

from mlotool.core import BoundModule
from mlotool.losses import sample_weight_analysis, weight_against_loss
from mlotool.losses.analyses import wrong_label_metrics
from mlotool.models import SampleWeights, WeightNet


@pytest.fixture
def batches() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    target = torch.tensor([0, 1, 2, 0, 1])
    inputs = torch.randn(5, 4, generator=generator)
    whole = {"input": inputs, "target": target, "index": torch.arange(5), "clean_target": torch.tensor([0, 1, 2, 1, 1])}
    return [{name: values[:3] for name, values in whole.items()}, {name: values[3:] for name, values in whole.items()}]


def test_weight_against_loss(batches: list[dict[str, torch.Tensor]]) -> None:
    model, weigher = nn.Linear(4, 3), WeightNet(hidden=4)
    result = weight_against_loss(batches, model=BoundModule(model), weigher=BoundModule(weigher))
    inputs, target = torch.cat([b["input"] for b in batches]), torch.cat([b["target"] for b in batches])
    losses = -torch.log_softmax(model(inputs), dim=1)[torch.arange(5), target]
    torch.testing.assert_close(result["loss"], losses.detach())
    torch.testing.assert_close(result["weight"], weigher(losses[:, None]).squeeze(1).detach())
    assert result["target"].tolist() == target.tolist()
    assert result["clean"].tolist() == [True, True, True, False, True]
    weight = result["weight"]
    torch.testing.assert_close(result["mean_weight"], weight.mean())
    torch.testing.assert_close(result["mean_weight_wrong"], weight[3])
    torch.testing.assert_close(result["mean_weight_right"], weight[[0, 1, 2, 4]].mean())
    assert not any(values.requires_grad for values in result.values())


def test_clean_data_has_no_metrics_of_wrong_labels(batches: list[dict[str, torch.Tensor]]) -> None:
    model, weights = nn.Linear(4, 3), SampleWeights(5)
    for batch in batches:
        del batch["clean_target"]
    result = sample_weight_analysis(batches, model=BoundModule(model), weights=BoundModule(weights))
    assert set(result) == {"loss", "weight", "target", "mean_weight"}
    assert result["weight"].tolist() == [0.5] * 5


def test_wrong_label_auc_is_the_share_of_right_pairs() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = (torch.rand(60, generator=generator) * 10).round() / 10  # with ties
    is_wrong = torch.rand(60, generator=generator) < 0.4
    pairs = weight[is_wrong][:, None] - weight[~is_wrong][None, :]
    expected = ((pairs < 0).float() + 0.5 * (pairs == 0).float()).mean()
    assert float(wrong_label_metrics(weight, is_wrong)["wrong_label_auc"]) == pytest.approx(float(expected))


def test_tiny_weights_are_told_apart() -> None:
    weight = torch.tensor([1e-12, 2e-12, 3e-12, 4e-12])
    assert wrong_label_metrics(weight, torch.tensor([True, True, False, False]))["wrong_label_auc"] == 1.0


@pytest.mark.parametrize("is_wrong", [torch.zeros(3).bool(), torch.ones(3).bool()])
def test_no_auc_without_two_kinds(is_wrong: torch.Tensor) -> None:
    assert wrong_label_metrics(torch.rand(3), is_wrong) == {}
