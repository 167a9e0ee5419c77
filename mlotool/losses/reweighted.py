"""Losses whose samples have weights or labels that other problems learn, and analyses of these."""

from collections.abc import Callable, Iterable

from torch import Tensor
from torch.nn import functional as F

from mlotool.core import BoundModule, LossOutput, stop_gradient
from mlotool.core.settings import target
from mlotool.losses.cross_entropy import (
    Batch,
    Kind,
    accuracy,
    auroc,
    collected,
    mean_squared_errors,
    sample_losses,
    weighted_mean,
)

# n: samples of the whole split, b: batch, d: features, k: classes


@target("loss")
def reweighted_cross_entropy(
    batch: Batch, *, model: BoundModule, weigher: BoundModule, normalize: bool = True
) -> LossOutput:
    """Cross-entropy with weights that `weigher` computes from each sample's loss (Meta-Weight-Net).

        l_i = -log softmax(model(x_i))[y_i],   w_i = weigher(stop_gradient(l_i))
        C = sum_i w_i l_i / sum_j w_j      (normalize)
        C = 1/b sum_i w_i l_i              (otherwise)

    As in the authors' code, no gradient flows from the weights to `model` through the losses, while the sum of the
    weights does pass gradients to `weigher`. Both forms are the authors'. The first is that of the paper's experiments:
    only the ratios of the weights matter, and the step size does not change. The second is equation 1 with the mean
    instead of the sum: small weights also slow down the training.

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
    batch: Batch, *, model: BoundModule, weights: BoundModule, normalize: bool = True
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


@target("loss")
def reweighted_squared_error(
    batch: Batch, *, model: BoundModule, weigher: BoundModule, normalize: bool = True
) -> LossOutput:
    """Squared error with weights that `weigher` makes of each sample's error: Meta-Weight-Net for a regression.

        l_i = mean over the outputs of (model(x_i) - y_i)^2
        w_i = weigher(stop_gradient(l_i)),   C as in `reweighted_cross_entropy`

    Args:
        batch: `input` (b, ...) and `target` (b, o), of the same shape as the output.
        model: role.
        weigher: role; maps losses (b, 1) to weights (b, 1).
        normalize: divide the weights by their sum.

    Returns:
        The loss, with the metric `mean_weight`.

    Raises:
        RunError: output and target differ in shape.
    """
    losses = mean_squared_errors(batch, model)
    return _weighted(losses, weigher(stop_gradient(losses)[:, None]).squeeze(1), normalize)


@target("loss")
def sample_weighted_squared_error(
    batch: Batch, *, model: BoundModule, weights: BoundModule, normalize: bool = True
) -> LossOutput:
    """Squared error with one learned weight for each training sample: data hyper-cleaning for a regression.

        l_i = mean over the outputs of (model(x_i) - y_i)^2
        w_i = weights(index_i),   C as in `reweighted_cross_entropy`

    Args:
        batch: `input` (b, ...), `target` (b, o), of the same shape as the output, and `index` (b,).
        model: role.
        weights: role; maps indices (b,) to weights (b,).
        normalize: divide the weights by their sum.

    Returns:
        The loss, with the metric `mean_weight`.

    Raises:
        RunError: output and target differ in shape.
    """
    losses = mean_squared_errors(batch, model)
    return _weighted(losses, weights(batch["index"]), normalize)


def _weighted(
    losses: Tensor, weight: Tensor, normalize: bool, accuracy: Callable[[], Tensor] | None = None
) -> LossOutput:
    loss = weighted_mean(losses, weight, normalize)

    def metrics() -> dict[str, Tensor]:
        own = {} if accuracy is None else {"accuracy": accuracy()}
        return own | {"mean_weight": weight.detach().mean()}

    return LossOutput(loss, metrics)


@target("analysis")
def weight_against_loss(
    batches: Iterable[Batch], *, model: BoundModule, weigher: BoundModule, loss: Kind | None = None
) -> dict[str, Tensor]:
    """Return each sample's loss and the weight that a weight net gives it.

    Args:
        batches: of one pass over a split, with `input`, `target` and, where labels were corrupted, `clean_target`.
        model: role; gives logits, or what `reweighted_squared_error` compares with targets that are real numbers.
        weigher: role; maps losses (b, 1) to weights (b, 1).
        loss: of a sample, `cross_entropy` or `squared_error`. None: squared error if the target of a sample is one
            floating-point number, else cross-entropy.

    Returns:
        1-D, in the order of the batches: `loss`, `weight`, `target`; with `clean_target` also `clean` (whether the
        label is right). 0-D: `mean_weight`; with `clean_target` also what `wrong_label_metrics` returns.
    """
    return _analyse(batches, model, lambda batch, losses: weigher(losses[:, None]).squeeze(1), loss)


@target("analysis")
def sample_weight_analysis(
    batches: Iterable[Batch], *, model: BoundModule, weights: BoundModule, loss: Kind | None = None
) -> dict[str, Tensor]:
    """Return each sample's loss and its own learned weight.

    Args:
        batches: as for `weight_against_loss`, with `index`.
        model: role; as for `weight_against_loss`.
        weights: role; maps indices (b,) to weights (b,).
        loss: as for `weight_against_loss`.

    Returns:
        As `weight_against_loss`.
    """
    return _analyse(batches, model, lambda batch, losses: weights(batch["index"]), loss)


def wrong_label_metrics(weight: Tensor, is_wrong: Tensor) -> dict[str, Tensor]:
    """Return how well low weights detect wrong labels.

    Args:
        weight: (n,), the weight of each sample.
        is_wrong: (n,) bool, whether its label is wrong.

    Returns:
        0-D: `wrong_label_auc`, the area under the ROC curve of `1 - weight` as a detector of wrong labels (0.5: chance,
        1: every wrong label has a lower weight than every right one), `mean_weight_wrong` and `mean_weight_right`.
        Empty if all labels are right, or all are wrong.
    """
    if bool(is_wrong.all()) or not bool(is_wrong.any()):
        return {}
    return {
        # float64: weights near 0 must not become equal in `1 - weight`.
        "wrong_label_auc": auroc(1 - weight.double(), is_wrong),
        "mean_weight_wrong": weight[is_wrong].mean(),
        "mean_weight_right": weight[~is_wrong].mean(),
    }


def _analyse(
    batches: Iterable[Batch], model: BoundModule, weigh: Callable[[Batch, Tensor], Tensor], loss: Kind | None
) -> dict[str, Tensor]:
    arrays = collected(batches, lambda batch: _rows(batch, model, weigh, loss))
    scalars = {"mean_weight": arrays["weight"].mean()}
    if "clean" in arrays:
        scalars.update(wrong_label_metrics(arrays["weight"], ~arrays["clean"]))
    return arrays | scalars


def _rows(
    batch: Batch, model: BoundModule, weigh: Callable[[Batch, Tensor], Tensor], loss: Kind | None
) -> dict[str, Tensor]:
    losses = sample_losses(batch, model, loss)
    rows = {"loss": losses, "weight": weigh(batch, losses), "target": batch["target"]}
    if "clean_target" in batch:
        rows["clean"] = (batch["target"] == batch["clean_target"]).reshape(len(losses), -1).all(dim=1)
    return rows


@target("loss")
def corrected_cross_entropy(
    batch: Batch, *, model: BoundModule, corrector: BoundModule, weigher: BoundModule, normalize: bool = True
) -> LossOutput:
    """Cross-entropy with corrected labels and weights per sample, for the lower problem.

        h_i, z_i = model.features_and_logits(x_i),   c_i = corrector(stop_gradient(h_i), y_i)
        l_i = -sum_k c_ik log softmax(z_i)_k,        w_i = weigher(stop_gradient(l_i))
        C = sum_i w_i l_i / sum_j w_j   (normalize),   1/b sum_i w_i l_i   (otherwise)

    No gradient flows from labels and weights to `model`: otherwise the labels would follow the model's predictions.

    Args:
        batch: `input` (b, ...) and `target` (b,).
        model: role; has `features_and_logits`, which gives (b, d) and (b, k).
        corrector: role; maps features (b, d) and labels (b,) to labels (b, k).
        weigher: role; maps losses (b, 1) to weights (b, 1).
        normalize: divide the weights by their sum.

    Returns:
        The loss, with the metrics `accuracy` (against the given labels) and `mean_weight`.

    Source: Choe et al. 2023, Betty (arXiv 2207.02849), section 5.2 and listing 4, where gradients do flow through the
    features.
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
    """Cross-entropy of the classifier and of the corrector's own prediction on clean samples, for the upper problem.

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
    arrays = collected(batches, lambda batch: _correction(batch, model, corrector, weigher))
    scalars = {"mean_weight": arrays["weight"].mean(), "mean_trust": arrays["trust"].mean()}
    if "clean_target" in arrays:
        clean_target = arrays.pop("clean_target")
        arrays["clean"] = arrays["target"] == clean_target
        scalars["given_right"] = arrays["clean"].float().mean()
        scalars["corrected_right"] = (arrays["corrected"] == clean_target).float().mean()
        scalars.update(wrong_label_metrics(arrays["weight"], ~arrays["clean"]))
    return arrays | scalars


def _correction(batch: Batch, model: BoundModule, corrector: BoundModule, weigher: BoundModule) -> dict[str, Tensor]:
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
