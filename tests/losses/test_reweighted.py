import pytest
import torch
from torch import nn

from mlotool.core import BoundModule
from mlotool.losses import reweighted_cross_entropy, sample_weighted_cross_entropy
from mlotool.models import SampleWeights, WeightNet


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "input": torch.randn(6, 4, generator=generator, dtype=torch.float64),
        "target": torch.randint(0, 3, (6,), generator=generator),
        "index": torch.tensor([8, 3, 0, 9, 1, 2]),
    }


@pytest.fixture
def model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 3).double()


@pytest.fixture
def weigher() -> WeightNet:
    torch.manual_seed(1)
    return WeightNet(hidden=5).double()


def _losses_and_gradients(batch: dict[str, torch.Tensor], model: nn.Linear) -> tuple[torch.Tensor, torch.Tensor]:
    """Each sample's cross-entropy (b,) and its gradient with respect to the linear layer's weight (b, 3, 4)."""
    with torch.no_grad():
        probability = torch.softmax(batch["input"] @ model.weight.T + model.bias, dim=1)
    losses = -probability[torch.arange(6), batch["target"]].log()
    error = probability - torch.eye(3).double()[batch["target"]]
    return losses, error[:, :, None] * batch["input"][:, None, :]


@pytest.mark.parametrize("normalize", [True, False])
def test_value_and_gradients_by_hand(
    batch: dict[str, torch.Tensor], model: nn.Linear, weigher: WeightNet, normalize: bool
) -> None:
    output = reweighted_cross_entropy(
        batch, model=BoundModule(model), weigher=BoundModule(weigher), normalize=normalize
    )
    output.loss.backward()
    losses, gradients = _losses_and_gradients(batch, model)
    weight = weigher(losses[:, None]).squeeze(1)
    scale = weight.sum() if normalize else torch.tensor(6.0)
    torch.testing.assert_close(output.loss, (weight * losses).sum() / scale)
    # The weights are constants for the model ...
    torch.testing.assert_close(model.weight.grad, ((weight[:, None, None] * gradients).sum(0) / scale).detach())
    # ... and dC/dw_i is (l_i - C) / sum w, or l_i / b, for the weigher.
    cotangent = (losses - output.loss.detach() * normalize) / scale.detach()
    expected = torch.autograd.grad(weight, list(weigher.parameters()), cotangent)
    torch.testing.assert_close([parameter.grad for parameter in weigher.parameters()], list(expected))
    torch.testing.assert_close(output.metrics["mean_weight"], weight.mean().detach())


def test_weights_that_underflow_give_no_nan(batch: dict[str, torch.Tensor], model: nn.Linear) -> None:
    weights = SampleWeights(10).double()
    nn.init.constant_(weights.logits, -1e4)
    output = sample_weighted_cross_entropy(batch, model=BoundModule(model), weights=BoundModule(weights))
    assert float(output.loss.detach()) == 0.0
