"""Batches of several runs as one: the same containers, each tensor with an axis of runs in front."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor


class NotJointError(Exception):
    """Several runs cannot be taken as one; its text says why, in one sentence."""


def stacked(batches: Sequence[Any], key: str = "a batch") -> Any:
    """Return batches of equal structure as one, with their tensors stacked along a new first axis.

    Args:
        batches: one for each run, at least one.
        key: where they stand, for messages.

    Raises:
        NotJointError: they differ in structure, in a shape, or in what is no tensor.

    Example:
        >>> stacked([{"input": torch.zeros(2), "name": "a"}, {"input": torch.ones(2), "name": "a"}])["input"]
        tensor([[0., 0.],
                [1., 1.]])
    """
    first = batches[0]
    if any(type(each) is not type(first) for each in batches):
        raise NotJointError(f"{key} is of different types in different runs.")
    if isinstance(first, Tensor):
        _check_alike(batches, key)
        return torch.stack(list(batches))
    if isinstance(first, Mapping):
        if any(each.keys() != first.keys() for each in batches):
            raise NotJointError(f"{key} has different keys in different runs.")
        return {name: stacked([each[name] for each in batches], f"{key}[{name!r}]") for name in first}
    if is_dataclass(first) and not isinstance(first, type):
        # Not dataclasses.replace: it calls __init__, which may take other arguments than the fields.
        joined = copy.copy(first)
        for field in fields(first):
            parts = [getattr(each, field.name) for each in batches]
            object.__setattr__(joined, field.name, stacked(parts, f"{key}.{field.name}"))
        return joined
    if isinstance(first, Sequence) and not isinstance(first, str | bytes):
        if any(len(each) != len(first) for each in batches):
            raise NotJointError(f"{key} has different lengths in different runs.")
        parts = [stacked(part, f"{key}[{place}]") for place, part in enumerate(zip(*batches, strict=True))]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)  # type: ignore[call-arg]
    if any(not _is_same(each, first) for each in batches):
        raise NotJointError(f"{key}, which is no tensor, has different values in different runs.")
    return first


def as_lanes(batch: Any, num_lanes: int, size: int) -> Any:
    """Return a batch of `num_lanes` times `size` samples with an axis for each, as views.

    Args:
        batch: tensors (num_lanes * size, ...) in dicts and lists.
        num_lanes: length of the new first axis.
        size: length of the second one.
    """
    if isinstance(batch, Tensor):
        return batch.unflatten(0, (num_lanes, size))
    if isinstance(batch, dict):
        return {name: as_lanes(value, num_lanes, size) for name, value in batch.items()}
    return [as_lanes(value, num_lanes, size) for value in batch]


def _check_alike(tensors: Sequence[Tensor], key: str) -> None:
    first = tensors[0]
    if any(each.shape != first.shape for each in tensors):
        shapes = ", ".join(str(list(shape)) for shape in dict.fromkeys(each.shape for each in tensors))
        raise NotJointError(f"{key} has different shapes in different runs: {shapes}.")
    if any(each.dtype != first.dtype or each.device != first.device for each in tensors):
        raise NotJointError(f"{key} has different dtypes or devices in different runs.")


def _is_same(value: Any, other: Any) -> bool:
    # Two numbers that are NaN are no different values here.
    return value is other or bool(value == other) or (value != value and other != other)
