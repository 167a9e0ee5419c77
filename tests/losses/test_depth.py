import math

import pytest
import torch
from torch import nn

from mlotool.core import BoundModule
from mlotool.core.errors import ConfigError
from mlotool.losses import depth_regularized_cross_entropy
from mlotool.losses.depth import depth_penalty


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


def test_layers_that_are_not_there_are_refused() -> None:
    with pytest.raises(ConfigError, match="part: found no layers at 'residual'"):
        depth_penalty(Stacked().named_parameters(), 0.5, 0.1, 0.01, part="residual")
