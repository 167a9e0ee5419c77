"""Modules of which each call runs a part, such as one path through a shared space."""

from torch import nn


def runs_in_part(module: nn.Module) -> bool:
    """Say whether a module, or one inside it, states by an attribute `runs_in_part` that a call runs a part of it.

    Over ranks, the gradient of each of its parameters is the mean over the ranks that have used it.

    Example:
        >>> runs_in_part(nn.Linear(2, 2))
        False
    """
    return any(getattr(each, "runs_in_part", False) is True for each in module.modules())
