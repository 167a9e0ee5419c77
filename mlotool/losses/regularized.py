"""Cross-entropies with penalties on parameters: a weight decay that another problem learns, smoothness in depth."""

import re
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

from mlotool.core import BoundModule, LossOutput
from mlotool.core.arguments import require
from mlotool.core.settings import Count, NonNegative, Positive, target
from mlotool.losses.cross_entropy import Batch, accuracy, auroc

# b: batch, k: classes, p: parameters of the model, N: layers


@target("loss")
def decayed_cross_entropy(batch: Batch, *, model: BoundModule, decay: BoundModule) -> LossOutput:
    """Mean cross-entropy with a separate weight decay for each parameter, which another problem learns.

        C = -1/b sum_i log softmax(model(x_i))[y_i] + 1/2 sum_j d_j theta_j^2

    Args:
        batch: `input` (b, ...) and `target` (b,).
        model: role; gives logits (b, k).
        decay: role; called without arguments, it returns d, (p,) in the order of the model's parameters, or (1,).

    Returns:
        The loss, with the metric `accuracy`.

    Source: Betty (arXiv 2207.02849), appendix B.1; Grazzi et al. 2020 (arXiv 2006.16218), section 4.
    """
    logits, target = model(batch["input"]), batch["target"]
    theta = torch.cat([tensor.reshape(-1) for tensor in model.parameters()])
    loss = F.cross_entropy(logits, target) + 0.5 * (decay() * theta.square()).sum()
    return LossOutput(loss, lambda: {"accuracy": accuracy(logits, target)})


@target("analysis")
def decay_analysis(batches: Iterable[Batch], *, decay: BoundModule, num_informative: Count) -> dict[str, Tensor]:
    """Return the learned weight decay of a linear classifier's features, and how well it detects useless features.

    Args:
        batches: one pass over a split; their inputs (b, d) have the number of features.
        decay: role; called without arguments, it returns (k d,), one number per weight in the order of (k, d), or (1,).
        num_informative: number of features, the first ones, that the label depends on; the others are useless.

    Returns:
        1-D (d,): `decay`, the geometric mean over classes. 0-D, unless all features are of one kind: `useless_auc`, the
        area under the ROC curve of the decay as a detector of useless features (0.5: chance), and `log10_ratio`, by how
        many orders of magnitude the decay of useless features is larger (difference of the means of log10).
    """
    num_features = int(next(iter(batches))["input"][0].numel())
    logarithm = decay().detach().log()
    logarithm = logarithm.expand(num_features) if len(logarithm) == 1 else logarithm
    logarithm = logarithm.reshape(-1, num_features).mean(dim=0)
    facts = {"decay": logarithm.exp()}
    is_useless = torch.arange(num_features, device=logarithm.device) >= num_informative
    if bool(is_useless.any()) and not bool(is_useless.all()):
        # Of the logarithm's sigmoid: torchmetrics would take values beyond [0, 1] for logits anyway.
        facts["useless_auc"] = auroc(torch.sigmoid(logarithm.double()), is_useless)
        facts["log10_ratio"] = (logarithm[is_useless].mean() - logarithm[~is_useless].mean()) / torch.tensor(10.0).log()
    return facts


_NUMBER = re.compile(r"(^|\.)(\d+)\.")


@target("loss")
def depth_regularized_cross_entropy(
    batch: Batch,
    *,
    model: BoundModule,
    h: Positive,
    tikhonov: NonNegative = 0.0,
    smoothness: NonNegative = 0.0,
    part: str = "layers",
) -> LossOutput:
    """Mean cross-entropy with penalties on large parameters, and on parameters that change from layer to layer.

        C = -1/b sum_i log softmax(model(x_i))[y_i]
            + tikhonov/2 norm(theta)^2 + smoothness/2 sum_n norm((theta^n - theta^{n-1}) / h)^2

    Args:
        batch: `input` (b, ...) and `target` (b,).
        model: role; gives logits (b, k).
        h: step size of the layers, T / N.
        tikhonov: weight of the penalty on all parameters of the model.
        smoothness: weight of the penalty on changes of the parameters from layer to layer.
        part: name of the module with the layers. Their parameters have the layers along the first axis, or the layer's
            number in the parameter's name.

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
