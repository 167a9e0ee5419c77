"""What the learned weights of a finished run look like, sample by sample."""

from collections.abc import Callable, Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from mlotool.core import BoundModule
from mlotool.core.settings import target

# n: samples of the whole split, b: batch

Batch = Mapping[str, Tensor]


@target("analysis")
def weight_against_loss(batches: Iterable[Batch], *, model: BoundModule, weigher: BoundModule) -> dict[str, Tensor]:
    """Return each sample's loss and the weight that a weight net gives it.

    Args:
        batches: of one pass over a split, with `input`, `target` and, where labels were corrupted, `clean_target`.
        model: role; gives logits.
        weigher: role; maps losses (b, 1) to weights (b, 1).

    Returns:
        1-D, in the order of the batches: `loss`, `weight`, `target`; with `clean_target` also `clean` (whether the
        label is right). 0-D: `mean_weight`; with `clean_target` also what `wrong_label_metrics` returns.
    """
    return _analyse(batches, model, lambda batch, losses: weigher(losses[:, None]).squeeze(1))


@target("analysis")
def sample_weight_analysis(batches: Iterable[Batch], *, model: BoundModule, weights: BoundModule) -> dict[str, Tensor]:
    """Return each sample's loss and its own learned weight.

    Args:
        batches: as for `weight_against_loss`, with `index`.
        model: role; gives logits.
        weights: role; maps indices (b,) to weights (b,).

    Returns:
        As `weight_against_loss`.
    """
    return _analyse(batches, model, lambda batch, losses: weights(batch["index"]))


def wrong_label_metrics(weight: Tensor, is_wrong: Tensor) -> dict[str, Tensor]:
    """Return how well low weights give wrong labels away.

    Args:
        weight: (n,).
        is_wrong: (n,) bool.

    Returns:
        0-D: `wrong_label_auc`, the area under the ROC curve of `1 - weight` as a detector of wrong labels (0.5:
        chance, 1: every wrong label has a lower weight than every right one), `mean_weight_wrong` and
        `mean_weight_right`; nothing where all labels are right or all are wrong.
    """
    if bool(is_wrong.all()) or not bool(is_wrong.any()):
        return {}
    return {
        # float64: weights near 0 must not become equal in `1 - weight`.
        "wrong_label_auc": auroc(1 - weight.double(), is_wrong),
        "mean_weight_wrong": weight[is_wrong].mean(),
        "mean_weight_right": weight[~is_wrong].mean(),
    }


def auroc(score: Tensor, is_positive: Tensor) -> Tensor:
    """Return the area under the ROC curve, 0-D, of scores (n,) in [0, 1] as a detector of what is positive (n,)."""
    from torchmetrics.functional.classification import binary_auroc  # takes a second to import

    found: Tensor = binary_auroc(score, is_positive.long())
    return found


def collected(batches: Iterable[Batch], rows: Callable[[Batch], Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the rows of all batches, by name of their column."""
    columns: dict[str, list[Tensor]] = {}
    with torch.no_grad():
        for batch in batches:
            for name, values in rows(batch).items():
                columns.setdefault(name, []).append(values)
    return {name: torch.cat(values) for name, values in columns.items()}


def _analyse(
    batches: Iterable[Batch], model: BoundModule, weigh: Callable[[Batch, Tensor], Tensor]
) -> dict[str, Tensor]:
    arrays = collected(batches, lambda batch: _rows(batch, model, weigh))
    scalars = {"mean_weight": arrays["weight"].mean()}
    if "clean" in arrays:
        scalars.update(wrong_label_metrics(arrays["weight"], ~arrays["clean"]))
    return arrays | scalars


def _rows(batch: Batch, model: BoundModule, weigh: Callable[[Batch, Tensor], Tensor]) -> dict[str, Tensor]:
    losses = F.cross_entropy(model(batch["input"]), batch["target"], reduction="none")
    rows = {"loss": losses, "weight": weigh(batch, losses), "target": batch["target"]}
    if "clean_target" in batch:
        rows["clean"] = batch["target"] == batch["clean_target"]
    return rows
