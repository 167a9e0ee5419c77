"""Losses of few-shot learning, in which a sample is a task."""

import math
from collections.abc import Iterable, Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from mlotool.core import BoundModule, LossOutput
from mlotool.core.settings import Count, NonNegative, Positive, Rounds, target
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
        chunk: number of tokens whose logits are in memory at once, as for `next_token`.

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


# t: tasks, s: samples of a task, n: num_steps


@target("analysis")
def few_shot_adaptation(
    batches: Iterable[Episode],
    *,
    model: BoundModule,
    kind: Literal["cross_entropy", "mean_squared_error", "next_token"] = "cross_entropy",
    num_steps: Rounds = 5,
    lr: Positive = 0.1,
    proximity: NonNegative = 0.0,
) -> Mapping[str, Tensor]:
    """Adapt the model to each task by gradient descent on its support part, and evaluate each step on its query part.

    Args:
        batches: `support` and `query`, each with `input` (t, s, ...) and `target` (t, s, ...).
        model: role; its parameters are the initialization.
        kind: the loss that is minimized, and the metric: accuracy, squared error, or nats per token.
        num_steps: n, number of gradient steps.
        lr: step size.
        proximity: weight of half the squared distance to the initialization, which is added to the loss.

    Returns:
        `query` (n + 1,): the metric on the query part, as a mean over tasks, before the first and after each step. 0-D:
        `before` and `after`, its first and last value, and `standard_error` of the last value over tasks.

    Source: Finn et al. 2017 (arXiv 1703.03400), section 5.
    """
    start = {name: tensor.detach() for name, tensor in model.named_parameters() if tensor.requires_grad}

    def loss(outputs: Tensor, target: Tensor) -> Tensor:
        if kind == "mean_squared_error":
            return (outputs - target).square().mean()
        # Of a language model each token is a sample, whose classes are along the last axis.
        return F.cross_entropy(outputs.flatten(0, -2), target.flatten())

    def measure(theta: Mapping[str, Tensor], part: Mapping[str, Tensor]) -> Tensor:
        outputs = model.at(theta)(part["input"])
        if kind == "cross_entropy":
            return (outputs.argmax(-1) == part["target"]).float().mean()
        return loss(outputs, part["target"])

    def objective(theta: Mapping[str, Tensor], support: Mapping[str, Tensor]) -> Tensor:
        distance = torch.stack([(tensor - start[name]).square().sum() for name, tensor in theta.items()]).sum()
        return loss(model.at(theta)(support["input"]), support["target"]) + 0.5 * proximity * distance

    def adapt(episode: Episode) -> Tensor:
        support, theta = episode["support"], start
        measured = [measure(theta, episode["query"])]
        for _ in range(num_steps):
            slope = torch.func.grad(objective)(theta, support)
            theta = {name: tensor - lr * slope[name] for name, tensor in theta.items()}
            measured.append(measure(theta, episode["query"]))
        return torch.stack(measured)

    parts = ("support", "query")
    by_task = torch.cat([torch.vmap(adapt)({part: dict(batch[part]) for part in parts}) for batch in batches])
    curve = by_task.mean(0)
    spread = by_task[:, -1].std(unbiased=len(by_task) > 1) / len(by_task) ** 0.5
    return {"query": curve, "before": curve[0], "after": curve[-1], "standard_error": spread}
