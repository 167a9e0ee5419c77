"""The numbers that a solve decides by: Python floats of a single system, tensors of systems side by side (tasks).

A single system needs dozens of these operations an iteration, and each costs a tensor fifty times what it costs a
float. Both follow IEEE 754: a division by zero gives an infinity or NaN.
"""

import math

import torch
from torch import Tensor

from mlotool.core.tracing import decided, is_joint, is_tracing

Number = float | Tensor
"""A float, or a tensor in float64, one value a system; while tracing a single system has a tensor, too."""

Truth = bool | Tensor
"""A bool, or a tensor of them, one a system."""


def measured(values: Tensor) -> Number:
    """Return values to decide by, 0-D or one a task: constant, on the CPU, in float64.

    Example:
        >>> import torch
        >>> measured(torch.tensor(0.5)), measured(torch.tensor([0.5, 1.0]))
        (0.5, tensor([0.5000, 1.0000], dtype=torch.float64))
    """
    values = values.detach()
    if values.dim():
        return values.cpu().double()
    return values.double() if is_tracing() else float(values)


def where(condition: Truth, a: Number, b: Number) -> Number:
    """Return `a` where the condition holds, and `b` elsewhere.

    Example:
        >>> import torch
        >>> where(True, 1.0, 2.0), where(torch.tensor([True, False]), 1.0, 2.0)
        (1.0, tensor([1., 2.]))
    """
    if isinstance(condition, Tensor):
        return torch.where(condition, a, b)
    return a if condition else b


def divided(a: Number, b: Number) -> Number:
    """Return `a / b`.

    Example:
        >>> divided(1.0, 4.0), divided(1.0, 0.0), divided(0.0, 0.0)
        (0.25, inf, nan)
    """
    if isinstance(a, float) and isinstance(b, float) and b == 0.0:
        return math.nan if a == 0.0 or math.isnan(a) else math.copysign(math.inf, a) * math.copysign(1.0, b)
    return a / b


def larger(a: Number, b: Number) -> Number:
    """Return the larger one; NaN where one of them is NaN.

    Example:
        >>> import torch
        >>> larger(1.0, 2.0), larger(torch.tensor([1.0, 3.0]), 2.0)
        (2.0, tensor([2., 3.]))
    """
    if isinstance(a, float) and isinstance(b, float):
        return a if a > b or math.isnan(a) else b
    if isinstance(a, float) or isinstance(b, float):
        tensor, number = (a, b) if isinstance(a, Tensor) else (b, a)
        assert isinstance(tensor, Tensor)
        return tensor.clamp_min(number)
    return torch.maximum(a, b)


def size_of(a: Number) -> Number:
    """Return the absolute value.

    Example:
        >>> size_of(-2.0)
        2.0
    """
    return a.abs() if isinstance(a, Tensor) else abs(a)


def root(a: Number) -> Number:
    """Return the square root; NaN of a negative number.

    Example:
        >>> root(4.0), root(-1.0)
        (2.0, nan)
    """
    if isinstance(a, Tensor):
        return a.sqrt()
    return math.sqrt(a) if a >= 0.0 else math.nan


def is_finite(a: Number) -> Truth:
    """Return whether a number is.

    Example:
        >>> is_finite(1.0), is_finite(float("nan"))
        (True, False)
    """
    return a.isfinite() if isinstance(a, Tensor) else math.isfinite(a)


def negated(a: Truth) -> Truth:
    """Return the opposite.

    Example:
        >>> import torch
        >>> negated(True), negated(torch.tensor([True, False]))
        (False, tensor([False,  True]))
    """
    return ~a if isinstance(a, Tensor) else not a


def may_hold(a: Truth) -> bool:
    """Return whether it holds for any system, for what changes none of the others: in a joint trace it may.

    Example:
        >>> import torch
        >>> may_hold(torch.tensor([True, False])), may_hold(torch.tensor(False))
        (True, False)
    """
    return (is_joint() or holds_anywhere(a)) if isinstance(a, Tensor) else a


def count_if(a: Truth) -> int | Tensor:
    """Return what counts for 1 where `may_hold(a)`: 1; in a joint trace, which comes there anyway, 1 or 0 by run.

    Example:
        >>> count_if(True)
        1
    """
    return a.any().long() if isinstance(a, Tensor) and is_joint() else 1


def holds_anywhere(a: Truth) -> bool:
    """Return whether it holds for any system.

    Example:
        >>> import torch
        >>> holds_anywhere(torch.tensor([True, False]))
        True
    """
    return decided(a.any()) if isinstance(a, Tensor) else a


def holds_everywhere(a: Truth) -> bool:
    """Return whether it holds for every system.

    Example:
        >>> import torch
        >>> holds_everywhere(torch.tensor([True, False]))
        False
    """
    return decided(a.all()) if isinstance(a, Tensor) else a


def filled(value: float, num_tasks: int | None) -> Number:
    """Return a number for each system.

    Example:
        >>> filled(0.5, None), filled(0.5, 2)
        (0.5, tensor([0.5000, 0.5000], dtype=torch.float64))
    """
    return value if num_tasks is None else torch.full((num_tasks,), value, dtype=torch.float64)


def known(value: bool, num_tasks: int | None) -> Truth:
    """Return a truth for each system; in a joint trace a tensor, that may become another one by run.

    Example:
        >>> known(True, None), known(True, 2)
        (True, tensor([True, True]))
    """
    if num_tasks is None:
        return torch.tensor(value) if is_joint() else value
    return torch.full((num_tasks,), value)
