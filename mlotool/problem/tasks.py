"""Parameters with a leading axis of tasks, and losses that are evaluated for each task by itself."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from mlotool.core.errors import ConfigError
from mlotool.core.loss_output import LossOutput

Stacked = dict[int, tuple[Tensor, ...]]


def stack_parameters(problem: str, module: nn.Module, num_tasks: int) -> None:
    """Replace each parameter that requires a gradient by `num_tasks` copies along a new first axis.

    Raises:
        ConfigError: the number is none, or the module keeps running statistics, which tasks cannot share.
    """
    if not isinstance(num_tasks, int) or num_tasks < 1:
        raise ConfigError(
            f"problems.{problem}.tasks: found {num_tasks!r}; expected a whole number of at least 1 or null. "
            f"Correct problems.{problem}.tasks."
        )
    running = [name for name, buffer in module.named_buffers() if name.endswith(("running_mean", "running_var"))]
    if running:
        raise ConfigError(
            f"problems.{problem}.module: found the running statistics {running[0]} with tasks={num_tasks}; expected "
            "none, since the tasks would share them. Build its BatchNorm with track_running_stats=false, or use "
            "another normalization."
        )
    stacked: dict[int, nn.Parameter] = {}
    for child in module.modules():
        for parameter in child._parameters.values():
            if parameter is not None and parameter.requires_grad and id(parameter) not in stacked:
                copies = parameter.detach().expand(num_tasks, *parameter.shape).clone()
                stacked[id(parameter)] = nn.Parameter(copies)
    for child in module.modules():
        for name, parameter in child._parameters.items():
            # A tied parameter has several places.
            if parameter is not None and id(parameter) in stacked:
                child._parameters[name] = stacked[id(parameter)]


def evaluate_tasks(
    problem: str,
    evaluate: Callable[[Stacked, Any], LossOutput],
    stacked: Stacked,
    batch: Any,
    num_tasks: int,
    *,
    with_metrics: bool,
) -> LossOutput:
    """Return the losses of all tasks, 1-D, with the mean of each metric.

    Args:
        problem: whose loss it is, for messages.
        evaluate: a task's loss, from its parameters and its part of the batch.
        stacked: by number of the problem, its stacked parameters.
        batch: tensors, in any nesting, whose first axis is the tasks'; or None.
        num_tasks: length of that axis.
        with_metrics: whether the metrics are wanted.

    Raises:
        ConfigError: the batch has another number of tasks.
    """

    def check(value: Any) -> Any:
        if isinstance(value, Tensor) and (value.dim() == 0 or len(value) != num_tasks):
            raise ConfigError(
                f"problems.{problem}.loss: found a tensor of shape {tuple(value.shape)} in a batch for {num_tasks} "
                f"tasks; expected the tasks along its first axis. Set stream.batch_size={num_tasks} with data whose "
                "samples are tasks, such as data=sinusoid_episodes, or remove tasks."
            )
        return value

    def one(tensors: Stacked, part: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
        output = evaluate(tensors, part)
        return output.loss, dict(output.metrics) if with_metrics else {}

    tree_map(check, batch)
    losses, metrics = torch.vmap(one, in_dims=(0, None if batch is None else 0), randomness="different")(stacked, batch)
    return LossOutput(losses, {name: values.mean() for name, values in metrics.items()})
