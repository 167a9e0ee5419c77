"""Losses of networks that are differential equations in depth."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from mlotool.core import BoundModule, LossOutput
from mlotool.core.arguments import require
from mlotool.core.settings import NonNegative, Positive, target
from mlotool.losses.cross_entropy import accuracy

# b: batch, k: classes, N: layers

_NUMBER = re.compile(r"(^|\.)(\d+)\.")


@target("loss")
def depth_regularized_cross_entropy(
    batch: Mapping[str, Tensor],
    *,
    model: BoundModule,
    h: Positive,
    tikhonov: NonNegative = 0.0,
    smoothness: NonNegative = 0.0,
    part: str = "layers",
) -> LossOutput:
    """Mean cross-entropy, with large parameters and parameters that change much from layer to layer penalised.

        C = -1/b sum_i log softmax(model(x_i))[y_i]
            + tikhonov/2 norm(theta)^2 + smoothness/2 sum_n norm((theta^n - theta^{n-1}) / h)^2

    Args:
        batch: `input` (b, ...) and `target` (b,).
        model: role; gives logits (b, k).
        h: step of the layers, T / N.
        tikhonov: of all parameters of the model.
        smoothness: of the layers' parameters in depth.
        part: name of the layers in the model; their parameters have the layers along the first axis, or the layer's
            number in their name.

    Returns:
        The loss, with the metrics `accuracy` and `penalty`.

    Source: Günther et al. 2020 (arXiv 1812.04352), section 2.1; Haber and Ruthotto 2017 (arXiv 1705.03341), section 4.
    """
    logits, target = model(batch["input"]), batch["target"]
    penalty = depth_penalty(model.named_parameters(), h, tikhonov, smoothness, part)
    loss = F.cross_entropy(logits, target) + penalty
    return LossOutput(loss, lambda: {"accuracy": accuracy(logits, target), "penalty": penalty.detach()})


def depth_penalty(
    parameters: Iterable[tuple[str, Tensor]], h: float, tikhonov: float, smoothness: float, part: str = "layers"
) -> Tensor:
    """Return `tikhonov/2 norm(theta)^2 + smoothness/2 sum_n norm((theta^n - theta^{n-1}) / h)^2`, 0-D.

    Args:
        parameters: names and tensors of the whole model.
        h: step of the layers.
        tikhonov: of all of them.
        smoothness: of those below `part`.
        part: name of the layers.

    Raises:
        ConfigError: there is none with two layers below `part`, though smoothness is not zero.
    """
    named = list(parameters)
    penalty = 0.5 * tikhonov * torch.stack([tensor.square().sum() for _, tensor in named]).sum()
    if not smoothness:
        return penalty
    stacked = _by_layer(named, part)
    expected = f"the name of the layers, whose parameters are {', '.join(name for name, _ in named[:5])}, ..."
    require(bool(stacked), "part", part, expected, "Correct part, or set smoothness=0.")
    changes = torch.stack([((tensor[1:] - tensor[:-1]) / h).square().sum() for tensor in stacked])
    return penalty + 0.5 * smoothness * changes.sum()


def _by_layer(named: Iterable[tuple[str, Tensor]], part: str) -> list[Tensor]:
    """Return the parameters of the layers, each kind with the layers along the first axis."""
    prefix = f"{part}." if part else ""
    stacked, numbered = [], defaultdict(list)
    for name, tensor in named:
        if name.startswith(prefix):
            rest = name[len(prefix) :]
            if _NUMBER.search(rest):
                numbered[_NUMBER.sub(r"\1*.", rest, count=1)].append(tensor)
            else:
                stacked.append(tensor)
    return [*stacked, *(torch.stack(tensors) for tensors in numbered.values())]
