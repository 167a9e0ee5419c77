"""Losses of few-shot learning, in which a sample is a task."""

import math
from collections.abc import Mapping
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from mlotool.core import BoundModule, LossOutput
from mlotool.core.settings import Count, NonNegative, target
from mlotool.losses.cross_entropy import accuracy
from mlotool.losses.next_token import token_losses

# s: samples of a task, k: classes, t: tokens of a sample, v: vocabulary

Episode = Mapping[str, Mapping[str, Tensor]]


@target("loss")
def episode_cross_entropy(
    batch: Episode,
    *,
    model: BoundModule,
    start: BoundModule | None = None,
    part: Literal["support", "query"] = "support",
    proximity: NonNegative = 0.0,
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


@target("loss")
def episode_mean_squared_error(
    batch: Episode,
    *,
    model: BoundModule,
    start: BoundModule | None = None,
    part: Literal["support", "query"] = "support",
    proximity: NonNegative = 0.0,
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


@target("loss")
def episode_next_token(
    batch: Episode,
    *,
    model: BoundModule,
    start: BoundModule | None = None,
    part: Literal["support", "query"] = "support",
    proximity: NonNegative = 0.0,
    chunk: Count | None = None,
) -> LossOutput:
    """Mean cross-entropy of the next token on one part of a task, and the distance to a start.

        C = -1/(s t) sum_ij log softmax(model(x_i)_j)[y_ij] + proximity / 2 norm(theta - phi)^2

    Args:
        batch: `support` and `query`, each with `input` (s, t) and `target` (s, t); of one task.
        model: role; gives logits (s, t, v); its parameters are theta.
        start: role; its parameters are phi.
        part: of the task.
        proximity: weight of the distance; it needs a start.
        chunk: tokens whose logits live at once, as for `next_token`.

    Returns:
        The loss, with the metric `bits_per_token`, which is without the distance.

    Source: as for `episode_cross_entropy`; of language models Kemaev et al. 2025, MixFlow-MG (arXiv 2505.00793),
        section 5.2, MAML.
    """
    loss = token_losses(model, batch[part], chunk).mean()
    return LossOutput(
        loss + _distance(model, start, proximity), lambda: {"bits_per_token": loss.detach() / math.log(2)}
    )


def _distance(model: BoundModule, start: BoundModule | None, proximity: float) -> Tensor | float:
    if start is None or proximity == 0.0:
        return 0.0
    pairs = zip(model.parameters(), start.parameters(), strict=True)
    return 0.5 * proximity * sum((a - b).square().sum() for a, b in pairs)
