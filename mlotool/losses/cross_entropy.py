"""Cross-entropy of a classifier."""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from mlotool.core import BoundModule, LossOutput
from mlotool.core.errors import RunError
from mlotool.core.settings import Share, target


@target("loss")
def mean_squared_error(batch: Mapping[str, Tensor], *, model: BoundModule) -> Tensor:
    """Mean of the squared errors over all samples and outputs.

        C = mean((model(x) - y)^2)

    Args:
        batch: `input` (b, ...) and `target`, of the same shape as the output.
        model: role.

    Returns:
        The loss.

    Raises:
        RunError: output and target differ in shape.
    """
    output, target = model(batch["input"]), batch["target"]
    # Broadcasting (b, 1) against (b,) would silently average over all pairs of samples.
    if output.shape != target.shape:
        raise RunError(
            f"mean_squared_error: the output has shape {tuple(output.shape)}, the target {tuple(target.shape)}; "
            "expected the same shape. Reshape the target in the data, or squeeze the output in the model."
        )
    # Not F.mse_loss: forward-mode differentiation over its backward is not implemented.
    return ((output - target) ** 2).mean()


# b: batch, k: classes


@target("loss")
def cross_entropy(batch: Mapping[str, Tensor], *, model: BoundModule, label_smoothing: Share = 0.0) -> LossOutput:
    """Mean cross-entropy of `model`'s logits.

        C = 1/b sum_i -log softmax(model(x_i))[y_i]

    Args:
        batch: `input` (b, ...) and `target` (b,).
        model: role; gives logits (b, k).
        label_smoothing: share of the target that is spread evenly over all classes, from 0 to 1.

    Returns:
        The loss, with the metric `accuracy`.
    """
    logits, target = model(batch["input"]), batch["target"]
    loss = F.cross_entropy(logits, target, label_smoothing=label_smoothing)
    return LossOutput(loss, lambda: {"accuracy": accuracy(logits, target)})


def accuracy(logits: Tensor, target: Tensor) -> Tensor:
    """Return the share of right predictions, 0-D and detached, of logits (b, k) and target (b,)."""
    return (logits.detach().argmax(dim=1) == target).float().mean()


def weighted_mean(losses: Tensor, weight: Tensor, normalize: bool) -> Tensor:
    """Return the weighted sum of losses, over the sum of the weights or, without `normalize`, over their number."""
    total = (weight * losses).sum()
    # The clamp only speaks when all weights have underflowed: the loss is then 0 instead of 0 / 0.
    return total / weight.sum().clamp_min(1e-12) if normalize else total / losses.numel()
