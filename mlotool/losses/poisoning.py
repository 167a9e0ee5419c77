"""Clean-label data poisoning: an upper problem that works against the lower one."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from mlotool.core import BoundModule, LossOutput
from mlotool.core.settings import Whole, target
from mlotool.losses.cross_entropy import Batch, accuracy

# b: batch, k: classes


@target("loss")
def poisoned_cross_entropy(
    batch: Batch, *, model: BoundModule, perturbation: BoundModule, base_class: Whole | None = None
) -> LossOutput:
    """Mean cross-entropy over samples, some of which are perturbed: for the lower problem.

        x'_i = x_i + [y_i = base_class, or base_class is None] perturbation(index_i)
        C = 1/b sum_i -log softmax(model(x'_i))[y_i]

    No label changes.

    Args:
        batch: `input` (b, ...), `target` (b,) and `index` (b,).
        model: role; gives logits (b, k).
        perturbation: role; maps indices (b,) to perturbations (b, ...), which are zero for samples without one.
        base_class: the class whose samples are perturbed; None: all classes.

    Returns:
        The loss, with the metrics `accuracy` and `poisoned` (the fraction of samples with a perturbation).

    Source: Huang et al. 2020, MetaPoison (arXiv 2004.00225), equation 2.
    """
    target = batch["target"]
    change = perturbation(batch["index"])
    if base_class is not None:
        change = (target == base_class).reshape(-1, *[1] * (change.dim() - 1)) * change
    logits = model(batch["input"] + change)
    loss = F.cross_entropy(logits, target)
    return LossOutput(
        loss,
        lambda: {
            "accuracy": accuracy(logits, target),
            "poisoned": change.detach().flatten(1).ne(0).any(dim=1).float().mean(),
        },
    )


@target("loss")
def negated_cross_entropy(batch: Batch, *, model: BoundModule) -> LossOutput:
    """Negated cross-entropy, for an upper problem that makes the lower one fail.

        C = 1/b sum_i log softmax(model(x_i))[y_i]

    Args:
        batch: `input` (b, ...) and `target` (b,), clean.
        model: role; gives logits (b, k).

    Returns:
        The loss, with the metric `accuracy`.

    Source: Munoz-Gonzalez et al. 2017 (arXiv 1708.08689), equation 1, the error-generic attack.
    """
    logits, target = model(batch["input"]), batch["target"]
    return LossOutput(-F.cross_entropy(logits, target), lambda: {"accuracy": accuracy(logits, target)})


@target("loss")
def attack_cross_entropy(batch: Batch, *, model: BoundModule, victim_class: Whole, base_class: Whole) -> LossOutput:
    """Cross-entropy of one class's samples with a target class, for a targeted attack by the upper problem.

        C = mean over i with y_i = victim_class of -log softmax(model(x_i))[base_class]

    Args:
        batch: `input` (b, ...) and `target` (b,), clean.
        model: role; gives logits (b, k).
        victim_class: the class whose samples are attacked.
        base_class: the class that these samples should be classified as.

    Returns:
        The loss (0 for a batch without samples of the victim class), with the metric `success`, the fraction of these
        samples that are classified as the base class.

    Source: Huang et al. 2020, MetaPoison (arXiv 2004.00225), equation 1.
    """
    logits = model(batch["input"])
    is_victim = (batch["target"] == victim_class).to(logits.dtype)
    losses = F.cross_entropy(logits, torch.full_like(batch["target"], base_class), reduction="none")
    count = is_victim.sum().clamp_min(1)
    return LossOutput(
        (is_victim * losses).sum() / count,
        lambda: {"success": (is_victim * (logits.detach().argmax(dim=1) == base_class)).sum() / count},
    )


@target("analysis")
def attack_analysis(
    batches: Iterable[Batch], *, model: BoundModule, victim_class: Whole, base_class: Whole
) -> dict[str, Tensor]:
    """Return how often samples of one class are classified as the target class of an attack.

    Args:
        batches: one pass over a split, clean.
        model: role; gives logits (b, k).
        victim_class: the class whose samples are attacked.
        base_class: the class that these samples should be classified as.

    Returns:
        0-D: `success` and `mistaken` (the fractions of samples of the victim class that are classified as the base
        class, and as any wrong class), and `num_victims`. 1-D: `prediction` and `target` of all samples.
    """
    with torch.no_grad():
        pairs = [(model(batch["input"]).argmax(dim=1), batch["target"]) for batch in batches]
    prediction, target = (torch.cat(column) for column in zip(*pairs, strict=True))
    victims = prediction[target == victim_class]
    return {
        "prediction": prediction,
        "target": target,
        "success": (victims == base_class).float().mean(),
        "mistaken": (victims != victim_class).float().mean(),
        "num_victims": torch.tensor(len(victims)),
    }
