"""How well a start adapts to new tasks."""

from collections.abc import Iterable, Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from mlotool.core import BoundModule
from mlotool.core.settings import NonNegative, Positive, Rounds, target
from mlotool.losses.episodes import Episode

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
    """Adapt to each task by gradient descent on its support, and judge each step on its query.

    Args:
        batches: `support` and `query`, each with `input` (t, s, ...) and `target` (t, s, ...).
        model: role; its parameters are the start.
        kind: the loss that is descended, and what is measured: accuracy, squared error, or nats a token.
        num_steps: of gradient descent.
        lr: its step size.
        proximity: weight of the half squared distance to the start, which is descended as well.

    Returns:
        `query` (n + 1,): the mean over tasks before and after each step; `before` and `after`, its ends;
        `standard_error` of the last one over tasks.

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
        found = [measure(theta, episode["query"])]
        for _ in range(num_steps):
            slope = torch.func.grad(objective)(theta, support)
            theta = {name: tensor - lr * slope[name] for name, tensor in theta.items()}
            found.append(measure(theta, episode["query"]))
        return torch.stack(found)

    parts = ("support", "query")
    by_task = torch.cat([torch.vmap(adapt)({part: dict(batch[part]) for part in parts}) for batch in batches])
    curve = by_task.mean(0)
    spread = by_task[:, -1].std(unbiased=len(by_task) > 1) / len(by_task) ** 0.5
    return {"query": curve, "before": curve[0], "after": curve[-1], "standard_error": spread}
