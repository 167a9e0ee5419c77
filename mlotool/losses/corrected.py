"""Label correction and reweighting: two upper problems over one classifier."""

from collections.abc import Iterable

import torch.nn.functional as F
from torch import Tensor

from mlotool.core import BoundModule, LossOutput, stop_gradient
from mlotool.core.settings import target
from mlotool.losses.cross_entropy import Batch, accuracy, collected, weighted_mean
from mlotool.losses.reweighted import wrong_label_metrics

# n: samples of the whole split, b: batch, d: features, k: classes


@target("loss")
def corrected_cross_entropy(
    batch: Batch, *, model: BoundModule, corrector: BoundModule, weigher: BoundModule, normalize: bool = True
) -> LossOutput:
    """Cross-entropy with corrected labels, weighted per sample: the lower problem.

        h_i, z_i = model.features_and_logits(x_i),   c_i = corrector(stop_gradient(h_i), y_i)
        l_i = -sum_k c_ik log softmax(z_i)_k,        w_i = weigher(stop_gradient(l_i))
        C = sum_i w_i l_i / sum_j w_j   (normalize),   1/b sum_i w_i l_i   (otherwise)

    Labels and weights are constants for `model`: what it could change about them through its features would make the
    labels follow the predictions.

    Args:
        batch: `input` (b, ...) and `target` (b,).
        model: role; has `features_and_logits`, which gives (b, d) and (b, k).
        corrector: role; maps features (b, d) and labels (b,) to labels (b, k).
        weigher: role; maps losses (b, 1) to weights (b, 1).
        normalize: divide the weights by their sum.

    Returns:
        The loss, with the metrics `accuracy` (against the given labels) and `mean_weight`.

    Source: Choe et al. 2023, Betty (arXiv 2207.02849), section 5.2 and listing 4, where features are not cut off.
    """
    features, logits = model.method("features_and_logits", batch["input"])
    label = corrector(stop_gradient(features), batch["target"])
    losses = -(label * F.log_softmax(logits, dim=1)).sum(dim=1)
    weight = weigher(stop_gradient(losses)[:, None]).squeeze(1)
    loss = weighted_mean(losses, weight, normalize)
    return LossOutput(
        loss, lambda: {"accuracy": accuracy(logits, batch["target"]), "mean_weight": weight.detach().mean()}
    )


@target("loss")
def correction_loss(batch: Batch, *, model: BoundModule, corrector: BoundModule) -> LossOutput:
    """Cross-entropy of the classifier and of the corrector's own prediction, on clean samples: the upper problem.

        C = 1/b sum_i -log softmax(z_i)[y_i] - log softmax(corrector.predict(h_i))[y_i]

    Args:
        batch: `input` (b, ...) and `target` (b,).
        model: role; has `features_and_logits`, which gives (b, d) and (b, k).
        corrector: role; has `predict`, which maps features (b, d) to logits (b, k).

    Returns:
        The loss, with the metrics `accuracy` of the classifier and `prediction_accuracy` of the corrector.

    Source: Choe et al. 2023, Betty (arXiv 2207.02849), section 5.2 and listing 4.
    """
    features, logits = model.method("features_and_logits", batch["input"])
    prediction, target = corrector.method("predict", features), batch["target"]
    loss = F.cross_entropy(logits, target) + F.cross_entropy(prediction, target)
    return LossOutput(
        loss, lambda: {"accuracy": accuracy(logits, target), "prediction_accuracy": accuracy(prediction, target)}
    )


@target("analysis")
def correction_analysis(
    batches: Iterable[Batch], *, model: BoundModule, corrector: BoundModule, weigher: BoundModule
) -> dict[str, Tensor]:
    """Return each sample's loss, weight and corrected label.

    Args:
        batches: of one pass over a split, with `input`, `target` and, where labels were corrupted, `clean_target`.
        model: role; has `features_and_logits`.
        corrector: role; corrects labels, and has `trust`.
        weigher: role; maps losses (b, 1) to weights (b, 1).

    Returns:
        1-D, in the order of the batches: `loss`, `weight`, `trust` (the given label's share), `target`, `corrected`
        (the most probable label); with `clean_target` also `clean`. 0-D: `mean_weight`, `mean_trust`; with
        `clean_target` also `given_right`, `corrected_right` (shares of right labels before and after) and what
        `wrong_label_metrics` returns.
    """
    arrays = collected(batches, lambda batch: _rows(batch, model, corrector, weigher))
    scalars = {"mean_weight": arrays["weight"].mean(), "mean_trust": arrays["trust"].mean()}
    if "clean_target" in arrays:
        clean_target = arrays.pop("clean_target")
        arrays["clean"] = arrays["target"] == clean_target
        scalars["given_right"] = arrays["clean"].float().mean()
        scalars["corrected_right"] = (arrays["corrected"] == clean_target).float().mean()
        scalars.update(wrong_label_metrics(arrays["weight"], ~arrays["clean"]))
    return arrays | scalars


def _rows(batch: Batch, model: BoundModule, corrector: BoundModule, weigher: BoundModule) -> dict[str, Tensor]:
    features, logits = model.method("features_and_logits", batch["input"])
    label = corrector(features, batch["target"])
    losses = -(label * F.log_softmax(logits, dim=1)).sum(dim=1)
    rows = {
        "loss": losses,
        "weight": weigher(losses[:, None]).squeeze(1),
        "trust": corrector.method("trust", features, batch["target"]),
        "target": batch["target"],
        "corrected": label.argmax(dim=1),
    }
    return rows | ({"clean_target": batch["clean_target"]} if "clean_target" in batch else {})
