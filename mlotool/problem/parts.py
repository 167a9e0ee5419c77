"""Modules of which each call runs a part, such as one path through a shared space."""

from collections.abc import Mapping
from typing import Any

from torch import nn


def runs_in_part(module: nn.Module) -> bool:
    """Say whether a module, or one inside it, states by an attribute `runs_in_part` that a call runs a part of it.

    Over ranks, the gradient of each of its parameters is the mean over the ranks that have used it.

    Example:
        >>> runs_in_part(nn.Linear(2, 2))
        False
    """
    return any(getattr(each, "runs_in_part", False) is True for each in module.modules())


def part_of_call(module: nn.Module, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], frozenset[str]] | None:
    """Return the part of a module that a call runs, where the module tells.

    It does by a method `part_of_call(arguments)`, which decides on the part (draws a path).

    Args:
        module: is going to be called.
        arguments: its keywords.

    Returns:
        The keywords with which the call runs that part, and the names of the parameters that it reads; None where the
        module has no such method, and may read all of them.

    Example:
        >>> part_of_call(nn.Linear(2, 2), {}) is None
        True
    """
    decide = getattr(module, "part_of_call", None) if getattr(module, "runs_in_part", False) is True else None
    return None if decide is None else decide(arguments)
