"""Domain adaptation: pretraining with learned weights, finetuning near what it gives, and what the weights found."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import torch
import torch.nn.functional as F
from torch import Tensor

from mlotool.core import BoundModule, LossOutput
from mlotool.core.errors import RunError
from mlotool.core.settings import NonNegative, target
from mlotool.losses.cross_entropy import Batch, accuracy, auroc, collected, weighted_mean

# n: samples of the whole split, b: batch, k: classes


@target("loss")
def input_weighted_cross_entropy(
    batch: Batch,
    *,
    model: BoundModule,
    weigher: BoundModule | None = None,
    normalize: bool = True,
    proximity: NonNegative = 0.0,
    free: Sequence[str] = (),
) -> LossOutput:
    """Cross-entropy weighted by a network of the inputs, with the distance to the initial parameters: for pretraining.

        l_i = -log softmax(model(x_i))[y_i],   s_i = sigmoid(weigher(x_i))
        C = sum_i s_i l_i / sum_j s_j + R      (normalize),   R = proximity norm(theta - theta_0)^2
        C = 1/b sum_i s_i l_i + R              (otherwise)

    Args:
        batch: `input` (b, ...) and `target` (b,).
        model: role; returns logits (b, k). If `proximity` is not 0, it has to be an `Anchored` module, whose `start` is
            theta_0.
        weigher: role; maps inputs to (b, 1). None: all weights are 1, as a baseline for learned weights.
        normalize: whether the weights are divided by their sum, so that their size does not change the step size.
        proximity: weight of the distance.
        free: patterns of names of parameters that the distance leaves out, such as those of a new last layer.

    Returns:
        The loss, with the metrics `accuracy` and `mean_weight`.

    Source: Choe et al. 2023, Betty (arXiv 2207.02849), section 5.3, listing 5 and appendix C.3, without `normalize`.
    """
    logits, target = model(batch["input"]), batch["target"]
    losses = F.cross_entropy(logits, target, reduction="none")
    weight = torch.ones_like(losses) if weigher is None else torch.sigmoid(weigher(batch["input"]).squeeze(1))
    loss = weighted_mean(losses, weight, normalize)
    if proximity:
        loss = loss + proximity * _distance(model, model.method("start"), free)
    return LossOutput(loss, lambda: {"accuracy": accuracy(logits, target), "mean_weight": weight.detach().mean()})


@target("loss")
def proximal_cross_entropy(
    batch: Batch, *, model: BoundModule, center: BoundModule, proximity: NonNegative, free: Sequence[str] = ()
) -> LossOutput:
    """Mean cross-entropy with the distance to another problem's parameters: for fine-tuning.

        C = -1/b sum_i log softmax(model(x_i))[y_i] + proximity norm(theta - phi)^2

    Args:
        batch: `input` (b, ...) and `target` (b,).
        model: role; gives logits (b, k); its parameters are theta.
        center: role; its parameters are phi, of theta's shapes in theta's order.
        proximity: weight of the distance.
        free: patterns of names of parameters that the distance leaves out, such as those of the last layer.

    Returns:
        The loss, with the metrics `accuracy` and `distance` (the norm).

    Raises:
        RunError: theta and phi differ in shape, or a pattern of `free` matches no parameter.

    Source: Choe et al. 2023, Betty (arXiv 2207.02849), section 5.3 and listing 5.
    """
    logits, target = model(batch["input"]), batch["target"]
    distance = _distance(model, center.parameters(), free)
    loss = F.cross_entropy(logits, target) + proximity * distance
    return LossOutput(loss, lambda: {"accuracy": accuracy(logits, target), "distance": distance.detach().sqrt()})


@target("loss")
def joint_cross_entropy(
    batch: Batch, *, model: BoundModule, source: BoundModule, source_weight: NonNegative = 1.0
) -> LossOutput:
    """Mean cross-entropy of two models on the same samples: a fine-tuned model, and the model that it started from.

        C = -1/b sum_i log softmax(model(x_i))[y_i] - source_weight/b sum_i log softmax(source(x_i))[y_i]

    Args:
        batch: `input` (b, ...) and `target` (b,).
        model: role; gives logits (b, k).
        source: role; returns logits (b, k).
        source_weight: weight of the second term.

    Returns:
        The loss, with the metrics `accuracy` and `source_accuracy`.
    """
    logits, source_logits, target = model(batch["input"]), source(batch["input"]), batch["target"]
    loss = F.cross_entropy(logits, target) + source_weight * F.cross_entropy(source_logits, target)
    return LossOutput(
        loss, lambda: {"accuracy": accuracy(logits, target), "source_accuracy": accuracy(source_logits, target)}
    )


@target("analysis")
def domain_weight_analysis(batches: Iterable[Batch], *, weigher: BoundModule) -> dict[str, Tensor]:
    """Return the weight that a network gives each sample, and how well the weights find the target domain.

    Args:
        batches: one pass over a split, with `input` and, if the data has it, `domain` (1: target domain).
        weigher: role; maps inputs to (b, 1).

    Returns:
        1-D, in the order of the batches: `weight`; with `domain` also `domain`. 0-D: `mean_weight`; where there are
        samples of both domains also `mean_weight_source`, `mean_weight_target` and `target_auc`, the area under the
        ROC curve of the weight as a detector of the target domain (0.5: chance).
    """

    def rows(batch: Batch) -> dict[str, Tensor]:
        weight = {"weight": torch.sigmoid(weigher(batch["input"]).squeeze(1))}
        return weight | ({"domain": batch["domain"]} if "domain" in batch else {})

    arrays = collected(batches, rows)
    weight, scalars = arrays["weight"], {"mean_weight": arrays["weight"].mean()}
    is_target = arrays.get("domain", torch.zeros(0)) == 1
    if bool(is_target.any()) and not bool(is_target.all()):
        scalars["mean_weight_source"] = weight[~is_target].mean()
        scalars["mean_weight_target"] = weight[is_target].mean()
        # float64: weights near 1 must not become equal.
        scalars["target_auc"] = auroc(weight.double(), is_target)
    return arrays | scalars


def _distance(model: BoundModule, center: Iterable[Tensor], free: Sequence[str]) -> Tensor:
    """Return the squared norm of theta - phi over the parameters whose names match none of `free`."""
    theta, phi = dict(model.named_parameters()), list(center)
    if [tensor.shape for tensor in theta.values()] != [tensor.shape for tensor in phi]:
        raise RunError(
            f"A distance between {len(theta)} and {len(phi)} parameters, of different shapes; expected two modules of "
            "the same architecture. Give both problems the same module."
        )
    near = [name for name in theta if not any(fnmatchcase(name, pattern) for pattern in free)]
    if len(near) == len(theta) and free:
        raise RunError(
            f"free={list(free)}: no parameter has such a name; expected a pattern for some of {', '.join(theta)}. "
            "Correct the pattern, or write free: []."
        )
    squares = [(theta[name] - tensor).square().sum() for name, tensor in zip(theta, phi, strict=True) if name in near]
    return torch.stack(squares).sum() if squares else torch.zeros(())
