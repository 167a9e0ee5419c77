"""A loss as its first step will meet it, evaluated without a trace."""

from collections.abc import Set
from typing import Any

import torch
from torch import Tensor, nn

from mlotool.core.errors import ConfigError
from mlotool.core.loss_output import LossOutput
from mlotool.core.user_code import WrongResultError, is_of_user, named, note
from mlotool.program.evaluation import Evaluation, Scope


def rehearsed_loss(evaluation: Evaluation, name: str, solved: Set[str], batch: Any) -> LossOutput:
    """Return a loss in training mode, with a graph. Parameters and buffers are copies, solutions have no backwards.

    Args:
        evaluation: of the program.
        name: the problem.
        solved: problems whose solutions its total gradient passes through.
        batch: the problem's batch.

    Raises:
        ConfigError: the loss has changed parameters, or its forward has made some.
    """
    problems = evaluation.problems
    given: Scope = {}
    for player in {name: None, **{role.problem: None for role in problems[name].roles.values()}}:
        is_leaf = player == name or player in solved
        constants = problems[player].constants()
        given[player] = {key: tensor.clone().requires_grad_(is_leaf) for key, tensor in constants.items()}
    before = {player: _parameters(problems[player].module) for player in given}
    with torch.enable_grad():
        output = evaluation.loss(name, given, batch, steps=())
    for player, tensors in given.items():
        for key, tensor in problems[player].constants().items():
            if not _is_same(tensors[key], tensor):
                raise ConfigError(
                    f"problems.{name}.loss: {named(problems[name].loss)} has changed the parameter '{key}' of "
                    f"'{player}'; expected a pure function, since a step may evaluate a loss many times. Leave steps "
                    "to the optimizer, and bounds to the module's forward."
                )
        made = _parameters(problems[player].module) - before[player]
        if made:
            raise ConfigError(
                f"problems.{player}.module: {named(problems[player].module)} has made the parameter '{min(made)}' in "
                "its forward; expected all of them in __init__, since no optimizer knows of this one. Make it there."
            )
    is_real = output.loss.requires_grad and not output.loss.is_complex()
    if is_real and is_of_user(problems[name].loss, *(problems[each].module for each in given)):
        _check_backward(evaluation, name, given, batch, output.loss)
    return output


def _check_backward(evaluation: Evaluation, name: str, given: Scope, batch: Any, loss: Tensor) -> None:
    """Take the gradient of a loss in which code of the user's has a part: that it can be, and that there is one."""
    leaves = [tensor for tensors in given.values() for tensor in tensors.values() if tensor.requires_grad]
    try:
        gradient = torch.autograd.grad(loss, leaves, allow_unused=True)
        if all(each is None for each in gradient):
            raise WrongResultError(
                "a tensor whose gradient does not reach the parameters",
                f"a loss that depends on the parameters of '{name}' through the modules that it was given",
                "Call those modules themselves, no copies of them.",
            )
    except Exception as error:
        note(error, lambda: evaluation.call_of(name, batch))
        raise


def _parameters(module: nn.Module) -> set[str]:
    return {key for key, _ in module.named_parameters()}


def _is_same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) or torch.equal(a.nan_to_num(), b.nan_to_num())
