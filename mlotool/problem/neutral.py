"""Modules whose outputs are held at a neutral value, as in a control."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mlotool.core.arguments import is_number, require, takes_nothing
from mlotool.core.errors import ConfigError
from mlotool.core.private import tree_map
from mlotool.core.user_code import named

_UNKNOWN = (
    "problems.{name}.neutral: found null, and {module} declares no `neutral`; expected the value at which "
    "a control holds its outputs in the loss of '{lower}'. Set problems.{name}.neutral=1.0 for weights, 0.0 for values "
    "that are added; in Python, set the attribute `neutral` of the module."
)
_METHOD = (
    "problems.{name}.neutral: found that the loss of '{lower}' calls the method '{method}' of {module}, which "
    "a control cannot hold at a neutral value; expected a call of the module itself. Let its forward return what "
    "the loss needs."
)


def hold(module: nn.Module, given: float | None = None) -> None:
    """Let a module return its neutral value from now on; one that has none, or that is held already, stays as it is.

    Args:
        module: it may have `neutral`, a number, or a method with the arguments of forward that returns the outputs.
        given: counts before what the module has.

    Example:
        >>> from mlotool.models import WeightNet
        >>> net = WeightNet()
        >>> hold(net)
        >>> net(torch.rand(2, 1))
        tensor([[1.],
                [1.]])
    """
    neutral = getattr(module, "neutral", None) if given is None else given
    if neutral is not None and not is_held(module):
        is_right = callable(neutral) or is_number(neutral)
        require(is_right, f"{type(module).__name__}.neutral", neutral, "a number, or a method with forward's arguments")
        module.forward = partial(_held, module.forward, neutral)


def is_held(module: nn.Module) -> bool:
    """Say whether a module returns its neutral value."""
    own = vars(module).get("forward")
    return isinstance(own, partial) and own.func is _held


def _held(forward: Callable[..., Any], neutral: Any, *inputs: Any, **options: Any) -> Any:
    if callable(neutral):
        return neutral(*inputs, **options)
    with torch.no_grad():
        outputs = forward(*inputs, **options)
    return tree_map(lambda x: torch.full_like(x, neutral) if isinstance(x, Tensor) else x, outputs)


def check_held(name: str, module: nn.Module, method: str, lower: str) -> None:
    """Refuse a module that a lower loss calls, and of which nobody knows a neutral value.

    Args:
        name: of its problem.
        module: the module.
        method: that is called; "" for the module itself.
        lower: the problem whose loss calls it.

    Raises:
        ConfigError: there is none. What is called without arguments, such as a hyperparameter, stays where it begins.
    """
    fields = {"name": name, "module": named(module), "lower": lower, "method": method}
    if method:
        raise ConfigError(_METHOD.format(**fields))
    if not is_held(module) and not takes_nothing(module.forward):
        raise ConfigError(_UNKNOWN.format(**fields))
