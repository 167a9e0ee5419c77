"""Moving a batch to a device."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor


def to_device(batch: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """Return a batch with its tensors on `device`, those of floating-point numbers as `dtype` (None leaves theirs)."""
    if isinstance(batch, Tensor):
        return batch.to(device, dtype if batch.is_floating_point() else None, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device, dtype) for key, value in batch.items()}
    if is_dataclass(batch) and not isinstance(batch, type):
        # Not dataclasses.replace: it calls __init__, which may take other arguments than the fields.
        moved = copy.copy(batch)
        for each in fields(batch):
            object.__setattr__(moved, each.name, to_device(getattr(batch, each.name), device, dtype))
        return moved
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device, dtype) for value in batch))
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        return type(batch)(to_device(value, device, dtype) for value in batch)  # type: ignore[call-arg]
    return batch
