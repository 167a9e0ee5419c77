import math

import pytest
import torch
from torch import nn

from mlotool.core import BoundModule, LossOutput
from mlotool.core.errors import RunError
from mlotool.losses import (
    cross_entropy,
    depth_regularized_cross_entropy,
    mean_squared_error,
    weight_against_loss,
)
from mlotool.losses.regularized import depth_penalty
from mlotool.losses.reweighted import wrong_label_metrics
from mlotool.models import WeightNet


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "input": torch.randn(6, 4, generator=generator, dtype=torch.float64),
        "target": torch.randint(0, 3, (6,), generator=generator),
    }


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_cross_entropy_is_the_formula(batch: dict[str, torch.Tensor], label_smoothing: float) -> None:
    model = nn.Linear(4, 3).double()
    output = cross_entropy(batch, model=BoundModule(model), label_smoothing=label_smoothing)
    logits = batch["input"] @ model.weight.T + model.bias
    log_probability = logits - logits.exp().sum(dim=1, keepdim=True).log()
    share = (1 - label_smoothing) * torch.eye(3).double()[batch["target"]] + label_smoothing / 3
    torch.testing.assert_close(output.loss, -(share * log_probability).sum(dim=1).mean())
    num_right = sum(int(row.argmax()) == int(label) for row, label in zip(logits, batch["target"], strict=True))
    assert float(output.metrics["accuracy"]) == pytest.approx(num_right / 6)
    assert not output.metrics["accuracy"].requires_grad


def test_mean_squared_error_is_the_formula(batch: dict[str, torch.Tensor]) -> None:
    model = nn.Linear(4, 1).double()
    target = torch.ones(6, 1, dtype=torch.float64)
    loss = mean_squared_error({"input": batch["input"], "target": target}, model=BoundModule(model))
    expected = sum((float(model(x).detach()) - 1) ** 2 for x in batch["input"]) / 6
    assert float(loss.detach()) == pytest.approx(expected)


def test_mean_squared_error_refuses_to_broadcast(batch: dict[str, torch.Tensor]) -> None:
    with pytest.raises(RunError, match=r"output has shape \(6, 1\), the target \(6,\); expected the same shape"):
        mean_squared_error(batch, model=BoundModule(nn.Linear(4, 1).double()))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")  # torch's own, in its forward mode
@pytest.mark.parametrize("loss", [cross_entropy, mean_squared_error])
def test_forward_over_reverse_gives_the_same_hessian_vector_product(loss: object) -> None:
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    vector = {name: torch.randn(p.shape, generator=generator, dtype=p.dtype) for name, p in parameters.items()}
    inputs = torch.randn(5, 2, generator=generator, dtype=torch.float64)
    batch = {"input": inputs, "target": inputs if loss is mean_squared_error else torch.arange(5) % 2}

    def value(given: dict[str, torch.Tensor]) -> torch.Tensor:
        return LossOutput.of(loss(batch, model=BoundModule(model, given))).loss  # type: ignore[operator]

    _, forward = torch.func.jvp(torch.func.grad(value), (parameters,), (vector,))
    leaves = {name: parameter.clone().requires_grad_() for name, parameter in parameters.items()}
    gradient = torch.autograd.grad(value(leaves), list(leaves.values()), create_graph=True)
    product = sum((g * v).sum() for g, v in zip(gradient, vector.values(), strict=True))
    reverse = torch.autograd.grad(product, list(leaves.values()))
    torch.testing.assert_close(list(forward.values()), list(reverse))


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


class Stacked(nn.Module):
    """Weights of three layers in one tensor, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterDict({"weight": nn.Parameter(torch.tensor([[1.0, 2.0], [0.0, 2.5], [4.0, 2.5]]))})
        self.classifier = nn.Parameter(torch.tensor([3.0]))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs


class Numbered(nn.Module):
    """The same layers, one module each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(2, 1, bias=False) for _ in range(3)])
        for layer, values in zip(self.layers, Stacked().layers["weight"], strict=True):
            layer.weight.data.copy_(values)
        self.classifier = nn.Parameter(torch.tensor([3.0]))


@pytest.mark.parametrize("model", [Stacked(), Numbered()])
def test_penalty_by_hand(model: nn.Module) -> None:
    h, tikhonov, smoothness = 0.5, 0.1, 0.01
    size = 1 + 4 + 0 + 6.25 + 16 + 6.25 + 9
    change = ((1 + 0.25) + (16 + 0)) / h**2
    found = depth_penalty(model.named_parameters(), h, tikhonov, smoothness)
    assert found.item() == pytest.approx(0.5 * tikhonov * size + 0.5 * smoothness * change)
    assert depth_penalty(model.named_parameters(), h, 0.0, 0.0).item() == 0.0


def test_it_is_added_to_the_cross_entropy() -> None:
    batch = {"input": torch.zeros(4, 2), "target": torch.zeros(4, dtype=torch.long)}
    found = depth_regularized_cross_entropy(batch, model=BoundModule(Stacked()), h=0.5, tikhonov=0.1, smoothness=0.01)
    penalty = depth_penalty(Stacked().named_parameters(), 0.5, 0.1, 0.01).item()
    assert found.loss.item() == pytest.approx(math.log(2) + penalty)
    assert found.metrics["penalty"].item() == pytest.approx(penalty)
    assert found.metrics["accuracy"].item() == 1.0
