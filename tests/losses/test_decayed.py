import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mlotool.core import BoundModule
from mlotool.losses import decay_analysis, decayed_cross_entropy
from mlotool.models import PositiveVector


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "input": torch.randn(6, 4, generator=generator, dtype=torch.float64),
        "target": torch.randint(0, 3, (6,), generator=generator),
    }


@pytest.mark.parametrize("size", [1, 15])
def test_value_and_gradients_by_hand(batch: dict[str, torch.Tensor], size: int) -> None:
    torch.manual_seed(0)
    model, decay = nn.Linear(4, 3).double(), PositiveVector(size, initial=0.3).double()
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
