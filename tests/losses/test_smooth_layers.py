import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mlotool.core import BoundModule
from mlotool.core.errors import ConfigError
from mlotool.losses import cross_entropy, smooth_layers_cross_entropy
from mlotool.models import DenseResidualNetwork


def test_the_price_is_that_of_a_loop_over_layers() -> None:
    model = DenseResidualNetwork([2], 5, num_layers=4, width=3, final_time=2.0).double()
    nn.init.normal_(model.layers.bias)
    batch = {"input": torch.randn(6, 2, dtype=torch.float64), "target": torch.arange(6) % 5}
    found = smooth_layers_cross_entropy(batch, model=BoundModule(model), step_size=0.5, tikhonov=0.3, smoothness=0.07)
    expected = F.cross_entropy(model(batch["input"]), batch["target"])
    previous = None
    for n in range(4):
        theta = torch.cat([model.layers.weight[n].flatten(), model.layers.bias[n]])
        expected = expected + 0.15 * theta @ theta
        if previous is not None:
            change = (theta - previous) / 0.5
            expected = expected + 0.035 * change @ change
        previous = theta
    torch.testing.assert_close(found.loss, expected)
    parameters = list(model.parameters())
    for mine, exact in zip(
        torch.autograd.grad(found.loss, parameters), torch.autograd.grad(expected, parameters), strict=True
    ):
        torch.testing.assert_close(mine, exact)
    assert found.metrics["accuracy"] == cross_entropy(batch, model=BoundModule(model)).metrics["accuracy"]


def test_a_model_without_such_layers_is_refused() -> None:
    batch = {"input": torch.randn(2, 3), "target": torch.zeros(2, dtype=torch.int64)}
    with pytest.raises(ConfigError, match="layers='layers', but the model's parameters are weight, bias"):
        smooth_layers_cross_entropy(batch, model=BoundModule(nn.Linear(3, 2)), step_size=1.0)
