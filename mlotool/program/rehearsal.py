"""A loss as its first step will meet it, evaluated without a trace."""

from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn

from mlotool.core.errors import ConfigError
from mlotool.core.loss_output import LossOutput
from mlotool.core.user_code import WrongResultError, is_of_user, named, note
from mlotool.program.engine import Engine
from mlotool.program.loss_plan import LossPlan


def rehearsed_loss(engine: Engine, number: int, solved: Set[int], batch: Any) -> LossOutput:
    """Return a loss in training mode, with a graph. Parameters and buffers are copies, solutions have no backwards.

    Args:
        engine: of the program.
        number: of the problem.
        solved: numbers of the problems whose solutions its total gradient passes through.
        batch: the problem's batch.

    Raises:
        ConfigError: the loss has changed parameters, or its forward has made some.
    """
    problem, values = engine.problems[number], engine.nothing()
    players = dict.fromkeys([number, *(engine.numbers[role.problem] for role in problem.roles.values())])
    for player in players:
        is_leaf = player == number or player in solved
        values[player] = [each.clone().requires_grad_(is_leaf) for each in engine.problems[player].current()]
    before = {player: _parameters(engine.problems[player].module) for player in players}
    with torch.enable_grad():
        output = engine.losses[number](values, batch)
    for player in players:
        other, tensors = engine.problems[player], values[player]
        assert tensors is not None
        for key, now, tensor in zip(other.theta, tensors, other.current(), strict=True):
            if not _is_same(now, tensor):
                raise ConfigError(
                    f"problems.{problem.name}.loss: {named(problem.loss)} has changed the parameter '{key}' of "
                    f"'{other.name}'; expected a pure function, since a step may evaluate a loss many times. Leave steps "
                    "to the optimizer, and bounds to the module's forward."
                )
        made = _parameters(other.module) - before[player]
        if made:
            raise ConfigError(
                f"problems.{other.name}.module: {named(other.module)} has made the parameter '{min(made)}' in "
                "its forward; expected all of them in __init__, since no optimizer knows of this one. Make it there."
            )
    is_real = output.loss.requires_grad and not output.loss.is_complex()
    if is_real and is_of_user(problem.loss, *(engine.problems[each].module for each in players)):
        leaves = [tensor for tensors in values for tensor in tensors or () if tensor.requires_grad]
        _check_backward(engine.losses[number], leaves, batch, output.loss)
    return output


def _check_backward(plan: LossPlan, leaves: Sequence[Tensor], batch: Any, loss: Tensor) -> None:
    """Take the gradient of a loss in which code of the user's has a part: that it can be, and that there is one."""
    try:
        gradient = torch.autograd.grad(loss, leaves, allow_unused=True)
        if all(each is None for each in gradient):
            raise WrongResultError(
                "a tensor whose gradient does not reach the parameters",
                f"a loss that depends on the parameters of '{plan.problem.name}' through the modules that it was given",
                "Call those modules themselves, no copies of them.",
            )
    except Exception as error:
        note(error, lambda: plan.call_of(batch))
        raise


def _parameters(module: nn.Module) -> set[str]:
    return {key for key, _ in module.named_parameters()}


def _is_same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) or torch.equal(a.nan_to_num(), b.nan_to_num())
