"""The precision that torch gives an operator, for what stands in its place."""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")

SHORT = (torch.float16, torch.bfloat16)


def in_float32(*kinds: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Let a function compute as autocast has its operator compute: without shorter products, in float32.

    Args:
        kinds: of devices, on which autocast does so.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def decorated(*args: P.args, **kwargs: P.kwargs) -> T:
            first = next(each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
            kind = first.device.type
            if kind not in kinds or not torch.is_autocast_enabled(kind):
                return function(*args, **kwargs)
            with torch.autocast(kind, enabled=False):
                return function(*map(_longer, args), **{name: _longer(each) for name, each in kwargs.items()})

        return decorated

    return decorate


def in_autocast_dtype(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function compute as autocast has an operator for its shorter type compute.

    Autocast casts the arguments of such an operator once, and leaves what the operator is made of alone. torch.func
    takes the operator apart and lets autocast see the parts, some of which it casts otherwise.
    """

    @wraps(function)
    def decorated(*args: P.args, **kwargs: P.kwargs) -> T:
        first = next(each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
        kind = first.device.type
        if not torch.is_autocast_enabled(kind):
            return function(*args, **kwargs)

        def cast(value: Any) -> Any:
            # Not of float64, nor of tensors on another device: autocast does not either.
            is_cast = isinstance(value, Tensor) and value.dtype in (torch.float32, *SHORT) and value.device.type == kind
            return value.to(torch.get_autocast_dtype(kind)) if is_cast else value

        with torch.autocast(kind, enabled=False):
            return function(*map(cast, args), **{name: cast(each) for name, each in kwargs.items()})

    return decorated


def _longer(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in SHORT else value
