"""Losses with a weight decay that another problem learns."""

from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from mlotool.core import BoundModule, LossOutput
from mlotool.core.settings import Count, target
from mlotool.losses.analyses import auroc
from mlotool.losses.cross_entropy import accuracy

# b: batch, k: classes, p: parameters of the model


@target("loss")
def decayed_cross_entropy(batch: Mapping[str, Tensor], *, model: BoundModule, decay: BoundModule) -> LossOutput:
    """Mean cross-entropy with a weight decay of its own for each parameter.

        C = -1/b sum_i log softmax(model(x_i))[y_i] + 1/2 sum_j d_j theta_j^2

    Args:
        batch: `input` (b, ...) and `target` (b,).
        model: role; gives logits (b, k).
        decay: role; called without arguments gives d, (p,) or (1,), in the order of the model's parameters.

    Returns:
        The loss, with the metric `accuracy`.

    Source: Betty (arXiv 2207.02849), appendix B.1; Grazzi et al. 2020 (arXiv 2006.16218), section 4.
    """
    logits, target = model(batch["input"]), batch["target"]
    theta = torch.cat([tensor.reshape(-1) for tensor in model.parameters()])
    loss = F.cross_entropy(logits, target) + 0.5 * (decay() * theta.square()).sum()
    return LossOutput(loss, lambda: {"accuracy": accuracy(logits, target)})


@target("analysis")
def decay_analysis(
    batches: Iterable[Mapping[str, Tensor]], *, decay: BoundModule, num_informative: Count
) -> dict[str, Tensor]:
    """Return what decay a linear classifier's features have got, and whether it tells useless features from others.

    Args:
        batches: of one pass over a split; their inputs (b, d) say how many features there are.
        decay: role; called without arguments gives (k d,), one number a weight, in the order of (k, d); or (1,).
        num_informative: features that the label depends on, the first ones; the others are useless.

    Returns:
        1-D (d,): `decay`, the geometric mean over classes. 0-D: `useless_auc`, the area under the ROC curve of the
        decay as a detector of useless features (0.5: chance), and `log10_ratio`, by how many orders of magnitude
        theirs is larger (difference of the means of log10); neither where all features are of one kind.
    """
    num_features = int(next(iter(batches))["input"][0].numel())
    logarithm = decay().detach().log()
    logarithm = (
        logarithm.expand(num_features) if len(logarithm) == 1 else logarithm.reshape(-1, num_features).mean(dim=0)
    )
    found = {"decay": logarithm.exp()}
    is_useless = torch.arange(num_features, device=logarithm.device) >= num_informative
    if bool(is_useless.any()) and not bool(is_useless.all()):
        # Of the logarithm's sigmoid: torchmetrics would take values beyond [0, 1] for logits anyway.
        found["useless_auc"] = auroc(torch.sigmoid(logarithm.double()), is_useless)
        found["log10_ratio"] = (logarithm[is_useless].mean() - logarithm[~is_useless].mean()) / torch.tensor(10.0).log()
    return found
