"""Tensors with tangents of forward mode, taken apart and joined again."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import TypeVar

from torch import Tensor
from torch.autograd import forward_ad

T = TypeVar("T", Tensor, Tensor | None)


def apart(tensors: Sequence[T]) -> tuple[list[T], list[Tensor | None]]:
    """Return the values, and the tangents, None where a tensor has none.

    Args:
        tensors: any; None stays.

    Example:
        >>> import torch
        >>> with dual_level():
        ...     values, tangents = apart([forward_ad.make_dual(torch.ones(1), torch.zeros(1)), torch.ones(1)])
        >>> values, tangents
        ([tensor([1.]), tensor([1.])], [tensor([0.]), None])
    """
    if not in_dual_level():
        return list(tensors), [None] * len(tensors)
    values, tangents = list[T](), list[Tensor | None]()
    for tensor in tensors:
        value, tangent = (tensor, None) if tensor is None else forward_ad.unpack_dual(tensor)
        values.append(value)
        tangents.append(tangent)
    return values, tangents


def joined(values: Sequence[T], tangents: Sequence[Tensor | None]) -> list[T]:
    """Return tensors of these values and tangents: what undoes `apart`.

    Args:
        values: any.
        tangents: one for each of them, or None.

    Example:
        >>> import torch
        >>> joined([torch.ones(1)], [None])
        [tensor([1.])]
    """
    return [
        value if value is None or tangent is None else forward_ad.make_dual(value, tangent)
        for value, tangent in zip(values, tangents, strict=True)
    ]


@contextmanager
def dual_level() -> Iterator[None]:
    """Open a level of forward mode, also within a custom autograd function, where all tangents would be lost."""
    _load()
    with forward_ad.dual_level(), forward_ad._set_fwd_grad_enabled(True):
        yield


@cache
def _load() -> None:
    """Load torch's formulas without the warning that it gives of its own code."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.script.* is deprecated", category=FutureWarning)
        import_module("torch._decomp.decompositions_for_jvp")


def in_dual_level() -> bool:
    """Return whether a level of forward mode is open; torch has one at a time.

    Example:
        >>> in_dual_level()
        False
    """
    return forward_ad._current_level >= 0


def any_has_tangent(tensors: Sequence[Tensor]) -> bool:
    """Return whether a tensor among these has a tangent.

    Args:
        tensors: any.

    Example:
        >>> import torch
        >>> any_has_tangent([torch.ones(1)])
        False
    """
    return in_dual_level() and any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)
