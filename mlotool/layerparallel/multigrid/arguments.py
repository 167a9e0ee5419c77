"""The arguments of `mgrit` and `mgrit_adjoint`: of which kind they have to be."""

import inspect
import math
from typing import Any

from torch import Tensor, nn

from mlotool.core.arguments import is_number, require

_STEP = "def step(u, n, h): return u + h * layers[n](u)"


def check_solve(step: Any, h: Any, group: Any, **tensors: Any) -> None:
    """Refuse arguments of `mgrit` and `mgrit_adjoint` that are of a wrong kind.

    Args:
        step: a function `step(u, n, h)` or a `BatchedStep`.
        h: step of the finest grid.
        group: a torch.distributed group, or None.
        tensors: states, adjoints or cotangents of floating-point numbers, by the name of the argument.

    Raises:
        ConfigError: about the first argument that is wrong.

    Example:
        >>> import torch
        >>> check_solve(lambda u, n, h: u, 0.1, None, u0=torch.ones(2))
        >>> check_solve(lambda u, n, h: u, 0.1, None, u0=[1.0, 1.0])
        Traceback (most recent call last):
            ...
        mlotool.core.errors.ConfigError: u0: found ...; expected a tensor of floating-point numbers. Make it one: ...
    """
    expected = "a function step(u, n, h) that returns the state after layer n, or a BatchedStep"
    require(_is_step(step), "step", step, expected, f"Write one: {_STEP}.")
    require(is_number(h) and math.isfinite(h), "h", h, "a finite number", "Give the step of the finest grid.")
    for key, value in tensors.items():
        is_right = isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
        require(is_right, key, value, "a tensor of floating-point numbers", "Make it one: torch.as_tensor(x).float().")
    # Which classes are groups is torch's matter.
    is_group = not isinstance(group, bool | int | float | str | list)
    require(is_group, "group", group, "a torch.distributed group or null", "Make it by torch.distributed.new_group().")


def _is_step(step: Any) -> bool:
    if hasattr(step, "many"):
        return True
    if not callable(step) or isinstance(step, type):
        return False
    try:
        inspect.signature(step.forward if isinstance(step, nn.Module) else step).bind(None, 0, 1.0)
    except TypeError:
        return False
    except ValueError:
        # Compiled code has no signature.
        pass
    return True
