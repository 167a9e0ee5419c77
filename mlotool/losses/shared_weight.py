"""How good a network's connections are, whatever their weights: a metric for evaluate.metrics."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mlotool.core import BoundModule
from mlotool.core.settings import target
from mlotool.losses.cross_entropy import accuracy

# b: batch, k: classes


@target("metric")
def shared_weight_accuracy(
    model: BoundModule, batch: Mapping[str, Tensor], constants: Sequence[float] = (-2.0, -1.0, -0.5, 0.5, 1.0, 2.0)
) -> dict[str, Tensor]:
    """Accuracy with one number for all parameters, on average over several numbers.

    What the parameters have been trained to has no part in it.

    Args:
        model: gives logits (b, k).
        batch: `input` (b, ...) and `target` (b,).
        constants: the numbers.

    Returns:
        `shared_weight_accuracy`, the mean; and the accuracy at each number, as `accuracy_at_-0.5`.

    Source: Gaier and Ha 2019, Weight Agnostic Neural Networks (arXiv 1906.04358), section 3.

    Example:
        >>> from mlotool.models import SharedWeightNetwork
        >>> batch = {"input": torch.tensor([[1.0, 2.0]]), "target": torch.tensor([1])}
        >>> shared_weight_accuracy(BoundModule(SharedWeightNetwork([2], 2)), batch, [-1.0, 1.0])
        {'shared_weight_accuracy': tensor(1.), 'accuracy_at_-1': tensor(1.), 'accuracy_at_1': tensor(1.)}
    """
    found = {}
    for constant in constants:
        shared = model.at({name: torch.full_like(each, constant) for name, each in model.named_parameters()})
        found[f"accuracy_at_{constant:g}"] = accuracy(shared(batch["input"]), batch["target"])
    return {"shared_weight_accuracy": torch.stack(list(found.values())).mean(), **found}
