"""Cross-entropy, squared error, and what is added to them."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mlotool.core import BoundModule, LossOutput
from mlotool.core.errors import RunError
from mlotool.losses import (
    cross_entropy,
    decay_analysis,
    decayed_cross_entropy,
    depth_regularized_cross_entropy,
    mean_squared_error,
)
from mlotool.losses.regularized import depth_penalty
from mlotool.models import PositiveVector


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_cross_entropy_is_the_formula(batch: dict[str, torch.Tensor], model: nn.Linear, label_smoothing: float) -> None:
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


@pytest.mark.parametrize("size", [1, 15])
def test_a_decay_by_hand(batch: dict[str, torch.Tensor], model: nn.Linear, size: int) -> None:
    decay = PositiveVector(size, initial=0.3).double()
    output = decayed_cross_entropy(batch, model=BoundModule(model), decay=BoundModule(decay))
    output.loss.backward()
    theta = torch.cat([tensor.detach().reshape(-1) for tensor in model.parameters()])
    cross_entropy = F.cross_entropy(model(batch["input"]), batch["target"])
    torch.testing.assert_close(output.loss, cross_entropy + 0.15 * theta.square().sum())
    # d/d log d_j = d_j theta_j^2 / 2, and the model's gradient has d_j theta_j beside the data's.
    slopes = 0.15 * theta.square()
    torch.testing.assert_close(decay.logarithm.grad, slopes if size > 1 else slopes.sum()[None])
    plain = torch.autograd.grad(cross_entropy, list(model.parameters()))
    for parameter, slope in zip(model.parameters(), plain, strict=True):
        torch.testing.assert_close(parameter.grad, slope + 0.3 * parameter.detach())


def test_the_analysis_tells_useless_features() -> None:
    decay = PositiveVector(8)
    with torch.no_grad():
        decay.logarithm.copy_(torch.tensor([0.1, 0.1, 10.0, 1.0, 0.1, 0.1, 10.0, 100.0]).log())
    found = decay_analysis([{"input": torch.zeros(3, 4)}], decay=BoundModule(decay), num_informative=2)
    torch.testing.assert_close(found["decay"], torch.tensor([0.1, 0.1, 10.0, 10.0]))
    assert float(found["useless_auc"]) == 1.0
    assert float(found["log10_ratio"]) == pytest.approx(2.0)
    assert set(decay_analysis([{"input": torch.zeros(3, 4)}], decay=BoundModule(decay), num_informative=4)) == {"decay"}
