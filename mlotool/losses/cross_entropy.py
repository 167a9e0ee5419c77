"""Cross-entropy of a classifier, its mean squared error, and what losses and analyses of samples are made of."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from mlotool.core import BoundModule, LossOutput
from mlotool.core.errors import RunError
from mlotool.core.settings import Share, target

# b: batch, k: classes, n: samples of the whole split

Batch = Mapping[str, Tensor]


@target("loss")
def mean_squared_error(batch: Batch, *, model: BoundModule) -> Tensor:
    """Mean squared error over all samples and outputs.

        C = mean((model(x) - y)^2)

    Args:
        batch: `input` (b, ...) and `target`, of the same shape as the output.
        model: role.

    Returns:
        The loss.

    Raises:
        RunError: output and target differ in shape.
    """
    return squared_errors(batch, model).mean()


@target("loss")
def cross_entropy(batch: Batch, *, model: BoundModule, label_smoothing: Share = 0.0) -> LossOutput:
    """Mean cross-entropy of `model`'s logits.

        C = 1/b sum_i -log softmax(model(x_i))[y_i]

    Args:
        batch: `input` (b, ...) and `target` (b,).
        model: role; gives logits (b, k).
        label_smoothing: share of the target probability that is spread evenly over all classes, from 0 to 1.

    Returns:
        The loss, with the metric `accuracy`.
    """
    logits, target = model(batch["input"]), batch["target"]
    loss = F.cross_entropy(logits, target, label_smoothing=label_smoothing)
    return LossOutput(loss, lambda: {"accuracy": accuracy(logits, target)})


def squared_errors(batch: Batch, model: BoundModule) -> Tensor:
    """Return `(model(x) - y)^2`, in the shape of the target; raises RunError if the output has another shape."""
    output, target = model(batch["input"]), batch["target"]
    # Broadcasting (b, 1) against (b,) would silently average over all pairs of samples.
    if output.shape != target.shape:
        raise RunError(
            f"squared error: the output has shape {tuple(output.shape)}, the target {tuple(target.shape)}; "
            "expected the same shape. Reshape the target in the data, or squeeze the output in the model."
        )
    # Not F.mse_loss: forward-mode differentiation over its backward is not implemented.
    return (output - target) ** 2


def mean_squared_errors(batch: Batch, model: BoundModule) -> Tensor:
    """Return the squared error of each sample, the mean over its outputs, (b,)."""
    errors = squared_errors(batch, model)
    return errors.reshape(len(errors), -1).mean(dim=1)


Kind = Literal["cross_entropy", "squared_error"]


def sample_losses(batch: Batch, model: BoundModule, kind: Kind | None = None) -> Tensor:
    """Return the loss of each sample (b,).

    None: squared error if the target of a sample is one floating-point number, else cross-entropy.
    """
    target = batch["target"]
    is_number = target.is_floating_point() and target.numel() == len(target)
    if kind == "squared_error" or (kind is None and is_number):
        return mean_squared_errors(batch, model)
    return F.cross_entropy(model(batch["input"]), target, reduction="none")


def accuracy(logits: Tensor, target: Tensor) -> Tensor:
    """Return the fraction of right predictions, 0-D and detached, for logits (b, k) and target (b,)."""
    return (logits.detach().argmax(dim=1) == target).float().mean()


def weighted_mean(losses: Tensor, weight: Tensor, normalize: bool) -> Tensor:
    """Return the weighted sum of losses, over the sum of the weights or, without `normalize`, over their number."""
    total = (weight * losses).sum()
    # The clamp only speaks when all weights have underflowed: the loss is then 0 instead of 0 / 0.
    return total / weight.sum().clamp_min(1e-12) if normalize else total / losses.numel()


def auroc(score: Tensor, is_positive: Tensor) -> Tensor:
    """Return the area under the ROC curve, 0-D, of scores (n,) in [0, 1] as a detector of what is positive (n,)."""
    from torchmetrics.functional.classification import binary_auroc  # takes a second to import

    area: Tensor = binary_auroc(score, is_positive.long())
    return area


def collected(batches: Iterable[Batch], rows: Callable[[Batch], Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the rows of all batches, by name of their column."""
    columns: dict[str, list[Tensor]] = {}
    with torch.no_grad():
        for batch in batches:
            for name, values in rows(batch).items():
                columns.setdefault(name, []).append(values)
    return {name: torch.cat(values) for name, values in columns.items()}


@target("metric")
def shared_weight_accuracy(
    model: BoundModule, batch: Batch, constants: Sequence[float] = (-2.0, -1.0, -0.5, 0.5, 1.0, 2.0)
) -> dict[str, Tensor]:
    """Accuracy of a network all of whose parameters have one value, and its mean over several values.

    The trained parameters are not used.

    Args:
        model: gives logits (b, k).
        batch: `input` (b, ...) and `target` (b,).
        constants: the values.

    Returns:
        0-D: `shared_weight_accuracy`, the mean; and the accuracy at each value, such as `accuracy_at_-0.5`.

    Source: Gaier and Ha 2019, Weight Agnostic Neural Networks (arXiv 1906.04358), section 3.

    Example:
        >>> from mlotool.models import SharedWeightNetwork
        >>> batch = {"input": torch.tensor([[1.0, 2.0]]), "target": torch.tensor([1])}
        >>> shared_weight_accuracy(BoundModule(SharedWeightNetwork([2], 2)), batch, [-1.0, 1.0])
        {'shared_weight_accuracy': tensor(1.), 'accuracy_at_-1': tensor(1.), 'accuracy_at_1': tensor(1.)}
    """
    accuracies = {}
    for constant in constants:
        shared = model.at({name: torch.full_like(tensor, constant) for name, tensor in model.named_parameters()})
        accuracies[f"accuracy_at_{constant:g}"] = accuracy(shared(batch["input"]), batch["target"])
    return {"shared_weight_accuracy": torch.stack(list(accuracies.values())).mean(), **accuracies}
