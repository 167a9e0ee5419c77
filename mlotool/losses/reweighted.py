"""Cross-entropies in which each sample has a weight that another problem learns."""

from collections.abc import Callable, Mapping

import torch.nn.functional as F
from torch import Tensor

from mlotool.core import BoundModule, LossOutput, stop_gradient
from mlotool.core.settings import target
from mlotool.losses.cross_entropy import accuracy, weighted_mean

# b: batch, k: classes


@target("loss")
def reweighted_cross_entropy(
    batch: Mapping[str, Tensor], *, model: BoundModule, weigher: BoundModule, normalize: bool = True
) -> LossOutput:
    """Cross-entropy with weights that `weigher` makes of each sample's loss (Meta-Weight-Net).

        l_i = -log softmax(model(x_i))[y_i],   w_i = weigher(stop_gradient(l_i))
        C = sum_i w_i l_i / sum_j w_j      (normalize)
        C = 1/b sum_i w_i l_i              (otherwise)

    The weights' dependence on `model` through the losses is cut, as in the authors' code; their sum is not cut from
    `weigher`. Both forms are the authors': the first is in the paper's experiments, where only the weights' ratios
    matter and the step size stays; the second is equation 1 with the mean for the sum, where small weights also slow
    the training down.

    Args:
        batch: `input` (b, ...) and `target` (b,).
        model: role; gives logits (b, k).
        weigher: role; maps losses (b, 1) to weights (b, 1).
        normalize: divide the weights by their sum.

    Returns:
        The loss, with the metrics `accuracy` and `mean_weight`.

    Source: Shu et al. 2019, Meta-Weight-Net, equations 1 and 3 and the published code.
    """
    logits, target = model(batch["input"]), batch["target"]
    losses = F.cross_entropy(logits, target, reduction="none")
    weight = weigher(stop_gradient(losses)[:, None]).squeeze(1)
    return _weighted(losses, weight, normalize, lambda: accuracy(logits, target))


@target("loss")
def sample_weighted_cross_entropy(
    batch: Mapping[str, Tensor], *, model: BoundModule, weights: BoundModule, normalize: bool = True
) -> LossOutput:
    """Cross-entropy with one learned weight for each training sample (data hyper-cleaning).

        w_i = weights(index_i),   C as in `reweighted_cross_entropy`

    Args:
        batch: `input` (b, ...), `target` (b,) and `index` (b,).
        model: role; gives logits (b, k).
        weights: role; maps indices (b,) to weights (b,).
        normalize: divide the weights by their sum; false is the form of the paper.

    Returns:
        The loss, with the metrics `accuracy` and `mean_weight`.

    Source: Franceschi et al. 2017, Forward and Reverse Gradient-Based Hyperparameter Optimization, section 5.1.
    """
    logits, target = model(batch["input"]), batch["target"]
    losses = F.cross_entropy(logits, target, reduction="none")
    return _weighted(losses, weights(batch["index"]), normalize, lambda: accuracy(logits, target))


def _weighted(losses: Tensor, weight: Tensor, normalize: bool, accuracy: Callable[[], Tensor]) -> LossOutput:
    loss = weighted_mean(losses, weight, normalize)
    return LossOutput(loss, lambda: {"accuracy": accuracy(), "mean_weight": weight.detach().mean()})
