"""Copies of batches for several runs, none of which shall see what another one writes."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from mlotool.core.bound_module import lazy_copy

_CONSTANTS = (str, bytes, int, float, complex, type(None))


def copied(value: Any) -> Any:
    """Return a copy of a batch: its containers anew; large tensors on a CPU take memory once they are written to.

    Args:
        value: tensors without a graph, numbers and texts in dicts, lists, tuples and dataclasses; anything else is
            copied as `copy.deepcopy` does.

    Example:
        >>> import torch
        >>> batch = {"input": torch.zeros(2), "name": "a"}
        >>> other = copied(batch)
        >>> other["input"].add_(1.0), batch["input"]
        (tensor([1., 1.]), tensor([0., 0.]))
    """
    if isinstance(value, Tensor):
        return lazy_copy(value)
    if isinstance(value, _CONSTANTS):
        return value
    if type(value) is dict:
        return {key: copied(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)([copied(each) for each in value])
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(copied, value))
    if is_dataclass(value) and not isinstance(value, type):
        twin = copy.copy(value)
        for field in fields(value):
            # The class may be frozen.
            object.__setattr__(twin, field.name, copied(getattr(value, field.name)))
        return twin
    return copy.deepcopy(value)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a batch."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))


def num_bytes(value: Any) -> int:
    """Return the memory of the tensors of a batch."""
    return sum(each.nbytes for each in tensors_in(value))
