"""Cross-entropy of a network of many residual layers, whose parameters shall be small and change little by layer."""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from mlotool.core import BoundModule, LossOutput
from mlotool.core.errors import ConfigError
from mlotool.losses.cross_entropy import accuracy

# b: batch, k: classes, N: layers


def smooth_layers_cross_entropy(
    batch: Mapping[str, Tensor],
    *,
    model: BoundModule,
    step_size: float,
    tikhonov: float = 0.0,
    smoothness: float = 0.0,
    layers: str = "layers",
) -> LossOutput:
    """Mean cross-entropy with a price on the size of the layers' parameters and on their change from layer to layer.

        C = -1/b sum_i log softmax(model(x_i))[y_i]
            + gamma_tik / 2 sum_n norm(theta^n)^2 + gamma_ddt / 2 sum_{n > 0} norm((theta^n - theta^{n-1}) / h)^2

    Coarse grids stand for several layers by one of them, so they are good where neighbouring layers are alike.

    Args:
        batch: `input` (b, ...) and `target` (b,).
        model: role; gives logits (b, k), and has the layers' parameters stacked as (N, ...).
        step_size: h, the layers' step T / N.
        tikhonov: gamma_tik.
        smoothness: gamma_ddt.
        layers: name of the module that the layers are: theta are the parameters in it.

    Returns:
        The loss, with the metric `accuracy`.

    Raises:
        ConfigError: the model has no parameters in `layers`.

    Source: Günther et al. 2020 (arXiv 1812.04352), equation 2.10; the two terms of R are those of its published code,
    which for peaks has gamma_tik = 1e-7 and gamma_ddt = 1e-5.
    """
    logits, target = model(batch["input"]), batch["target"]
    theta = [tensor for name, tensor in model.named_parameters() if f".{layers}." in f".{name}"]
    if not theta:
        names = ", ".join(name for name, _ in model.named_parameters())
        raise ConfigError(
            f"smooth_layers_cross_entropy: layers={layers!r}, but the model's parameters are {names}; expected the "
            "name of a module with parameters stacked by layer. Set the loss's layers to it."
        )
    size = sum(tensor.square().sum() for tensor in theta)
    change = sum((tensor.diff(dim=0) / step_size).square().sum() for tensor in theta)
    loss = F.cross_entropy(logits, target) + 0.5 * (tikhonov * size + smoothness * change)
    return LossOutput(loss, lambda: {"accuracy": accuracy(logits, target)})
