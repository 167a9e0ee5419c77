"""Losses of few-shot learning, in which a sample is a task."""

from collections.abc import Mapping
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from mlotool.core import BoundModule, LossOutput
from mlotool.losses.cross_entropy import accuracy

# s: samples of a task, k: classes

Episode = Mapping[str, Mapping[str, Tensor]]


def episode_cross_entropy(
    batch: Episode,
    *,
    model: BoundModule,
    start: BoundModule | None = None,
    part: Literal["support", "query"] = "support",
    proximity: float = 0.0,
) -> LossOutput:
    """Mean cross-entropy on one part of a task, and the distance to a start.

        C = -1/s sum_i log softmax(model(x_i))[y_i] + proximity / 2 norm(theta - phi)^2

    Args:
        batch: `support` and `query`, each with `input` (s, ...) and `target` (s,); of one task.
        model: role; gives logits (s, k); its parameters are theta.
        start: role; its parameters are phi.
        part: of the task.
        proximity: weight of the distance; it needs a start.

    Returns:
        The loss, with the metric `accuracy`.

    Source: Finn et al. 2017 (arXiv 1703.03400); with the distance Rajeswaran et al. 2019 (arXiv 1909.04630), Eq. 3.
    """
    logits, target = model(batch[part]["input"]), batch[part]["target"]
    loss = F.cross_entropy(logits, target) + _distance(model, start, proximity)
    return LossOutput(loss, lambda: {"accuracy": accuracy(logits, target)})


def episode_mean_squared_error(
    batch: Episode,
    *,
    model: BoundModule,
    start: BoundModule | None = None,
    part: Literal["support", "query"] = "support",
    proximity: float = 0.0,
) -> LossOutput:
    """Mean squared error on one part of a task, and the distance to a start.

        C = mean((model(x) - y)^2) + proximity / 2 norm(theta - phi)^2

    Args:
        batch: `support` and `query`, each with `input` (s, ...) and `target` of the model's output shape; of one task.
        model: role; its parameters are theta.
        start: role; its parameters are phi.
        part: of the task.
        proximity: weight of the distance; it needs a start.

    Returns:
        The loss, with the metric `error`, which is without the distance.

    Source: as for `episode_cross_entropy`.
    """
    error = (model(batch[part]["input"]) - batch[part]["target"]).square().mean()
    return LossOutput(error + _distance(model, start, proximity), lambda: {"error": error.detach()})


def _distance(model: BoundModule, start: BoundModule | None, proximity: float) -> Tensor | float:
    if start is None or proximity == 0.0:
        return 0.0
    pairs = zip(model.parameters(), start.parameters(), strict=True)
    return 0.5 * proximity * sum((a - b).square().sum() for a, b in pairs)
