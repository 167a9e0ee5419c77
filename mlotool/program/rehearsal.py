"""A loss as its first step will meet it, evaluated without a trace."""

from collections.abc import Iterable, Sequence, Set
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mlotool.core.errors import ConfigError
from mlotool.core.loss_output import LossOutput
from mlotool.core.user_code import WrongResultError, is_of_user, named, note
from mlotool.program.engine import Engine
from mlotool.program.loss_plan import LossPlan

# How Python sees `tensor.requires_grad_()` and `tensor.requires_grad = ..`.
_SETTERS = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]


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
    names: list[tuple[Tensor, str, str]] = []
    for player in players:
        other, is_leaf = engine.problems[player], player == number or player in solved
        tensors = [each.clone().requires_grad_(is_leaf) for each in other.current()]
        names += [(tensor, other.name, key) for key, tensor in zip(other.theta, tensors, strict=True)]
        values[player] = tensors
    before = {player: _parameters(engine.problems[player].module) for player in players}
    is_users = is_of_user(problem.loss, *(engine.problems[each].module for each in players))
    with torch.enable_grad(), _Guard(names) if is_users else nullcontext():
        output = engine.losses[number](values, batch)
    for player in players:
        other, given = engine.problems[player], values[player]
        assert given is not None
        for key, now, tensor in zip(other.theta, given, other.current(), strict=True):
            if not _is_same(now, tensor):
                raise ConfigError(
                    f"problems.{problem.name}.loss: {named(problem.loss)} has changed the parameter '{key}' of "
                    f"'{other.name}'; expected a pure function, since a step may evaluate a loss many times. Leave "
                    "steps to the optimizer, and bounds to the module's forward."
                )
        made = _parameters(other.module) - before[player]
        if made:
            raise ConfigError(
                f"problems.{other.name}.module: {named(other.module)} has made the parameter '{min(made)}' in "
                "its forward; expected all of them in __init__, since no optimizer knows of this one. Make it there."
            )
    is_real = output.loss.requires_grad and not output.loss.is_complex()
    if is_real and is_users:
        leaves = [tensor for tensors in values for tensor in tensors or () if tensor.requires_grad]
        _check_backward(engine.losses[number], leaves, batch, output.loss)
    return output


class _Guard(TorchFunctionMode):
    """Refuses, where it happens, that a loss freezes parameters or thaws them.

    Afterwards it would not show: those of other problems are constants in this evaluation, and are not in a pullback.
    """

    def __init__(self, tensors: Iterable[tuple[Tensor, str, str]]) -> None:
        super().__init__()
        self._names = {id(tensor): (player, key) for tensor, player, key in tensors}

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
