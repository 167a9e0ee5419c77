"""Cross-entropy of a classifier."""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from mlotool.core import BoundModule, LossOutput
from mlotool.core.settings import Share, target

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
