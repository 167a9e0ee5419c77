"""An optimizer step that was taken once, again on copies: to the bit, by the same kernel of torch."""

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from mlotool.problem.fused_step import aligned
from mlotool.problem.optimizer_step import OptimizerStep
from mlotool.problem.update import Hyperparameters, State


def replayed_step(
    optimizer: Optimizer,
    parameters: Sequence[Tensor],
    theta: Sequence[Tensor],
    gradient: Sequence[Tensor | None],
    state: Sequence[State],
    hyperparameters: Sequence[Hyperparameters],
) -> tuple[list[Tensor], list[State]]:
    """Return parameters and optimizer state after a step; the optimizer and its parameters stay as they are.

    Args:
        optimizer: of torch.
        parameters: its parameters, in the order of the others; only to tell which is in which group.
        theta: their values before the step.
        gradient: after clipping; None of a parameter that is left alone.
        state: of the optimizer before the step, one mapping a parameter.
        hyperparameters: at the step, one mapping a parameter.

    Example:
        >>> import torch
        >>> parameter = nn.Parameter(torch.ones(1))
        >>> optimizer = torch.optim.SGD([parameter], lr=0.5)
        >>> rates = [{"lr": 0.5}]
        >>> replayed_step(optimizer, [parameter], [torch.full((1,), 3.0)], [torch.ones(1)], [{}], rates)[0]
        [tensor([2.5000])]
    """
    places = {id(parameter): place for place, parameter in enumerate(parameters)}
    copies = [nn.Parameter(each.detach().clone()) for each in theta]
    for copied, slope in zip(copies, gradient, strict=True):
        copied.grad = None if slope is None else aligned(slope, copied)
    twin: Any = copy.copy(optimizer)
    twin._optimizer_step_pre_hooks, twin._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    twin.param_groups = []
    for group in optimizer.param_groups:
        members = [places[id(parameter)] for parameter in group["params"] if id(parameter) in places]
        if members:
            values = {**group, **hyperparameters[members[0]]}
            twin.param_groups.append({**values, "params": [copies[place] for place in members]})
    twin.state = defaultdict(dict)
    for place, each in enumerate(state):
        if each:
            twin.state[copies[place]] = {
                name: value.clone() if isinstance(value, Tensor) else value for name, value in each.items()
            }
    type(optimizer).step(twin)
    return [each.detach() for each in copies], [dict(twin.state.get(each, {})) for each in copies]


def taken_again(
    step: OptimizerStep,
    parameters: Sequence[Tensor],
    theta: Sequence[Tensor],
    gradient: Sequence[Tensor | None],
    state: Sequence[State],
    hyperparameters: Sequence[Hyperparameters],
    inputs: Sequence[Tensor],
) -> tuple[list[Tensor], list[State]]:
    """Return parameters and state after a step of a problem, as `Unroll.replay`.

    Args:
        step: the problem's.
        parameters: likewise.
        theta, gradient, state, hyperparameters: as for `replayed_step`, with the gradient before clipping.
        inputs: what shapes the problem; nothing of it shapes the update.
    """
    assert step.optimizer is not None
    return replayed_step(step.optimizer, parameters, theta, step.clip(gradient)[0], state, hyperparameters)
