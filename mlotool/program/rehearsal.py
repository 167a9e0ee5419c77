"""A loss as its first step will meet it, evaluated without a trace."""

from collections.abc import Set
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mlotool.core.errors import ConfigError
from mlotool.core.loss_output import LossOutput
from mlotool.core.user_code import WrongResultError, is_of_user, named, note
from mlotool.program.evaluation import Evaluation, Scope

# How Python sees `tensor.requires_grad_()` and `tensor.requires_grad = ..`.
_SETTERS = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]


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
    is_users = is_of_user(problems[name].loss, *(problems[each].module for each in given))
    with torch.enable_grad(), _Guard(given) if is_users else nullcontext():
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
    if is_real and is_users:
        _check_backward(evaluation, name, given, batch, output.loss)
    return output


class _Guard(TorchFunctionMode):
    """Refuses, where it happens, that a loss freezes parameters or thaws them.

    Afterwards it would not show: those of other problems are constants in this evaluation, and are not in a pullback.
    """

    def __init__(self, given: Scope) -> None:
        super().__init__()
        self._names = {
            id(tensor): (player, key) for player, tensors in given.items() for key, tensor in tensors.items()
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch."""
        kwargs = kwargs or {}
        if func in _SETTERS and id(args[0]) in self._names:
            value = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
            if not value or not args[0].requires_grad:
                player, key = self._names[id(args[0])]
                raise RuntimeError(
                    f"requires_grad of the parameter '{key}' of '{player}' is set to {bool(value)}; a loss leaves that "
                    "to mlotool. Take stop_gradient(role(x)) (from mlotool) for what is to have no gradient, and "
                    "freeze parameters in the module's __init__"
                )
        return func(*args, **kwargs)


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
