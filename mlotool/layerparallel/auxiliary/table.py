"""Tensors by sample, kept from one visit of the sample to the next."""

from typing import Any

import torch
from torch import Tensor

# s: samples of a batch, n: samples that there is room for, ...: the shape of a state


class Table:
    """A tensor for each sample of a data set; it grows to the largest sample number that it meets.

    Args:
        device: where the tensors are kept; None is where the first values are.

    Example:
        >>> table = Table()
        >>> table.put(torch.tensor([2]), torch.ones(1, 3))
        >>> table.get(torch.tensor([2, 0]), like=torch.zeros(2, 3))
        tensor([[1., 1., 1.],
                [0., 0., 0.]])
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._values: Tensor | None = None
        self._size = 0

    def get(self, slots: Tensor, like: Tensor) -> Tensor:
        """Return the values of samples, (s, ...); zeros where none have been put.

        Args:
            slots: numbers of the samples, (s,).
            like: a tensor (s, ...) of the shape, dtype and device to return.
        """
        values = self._grown(slots, like)
        return values[slots.to(values.device)].to(like.device, non_blocking=True)

    def put(self, slots: Tensor, values: Tensor) -> None:
        """Keep the values of samples.

        Args:
            slots: numbers of the samples, (s,).
            values: (s, ...), of the same shape behind s in every call.
        """
        kept = self._grown(slots, values)
        kept[slots.to(kept.device)] = values.to(kept.device)

    def to(self, device: torch.device) -> None:
        """Move the values to a device, unless the table was given a device of its own."""
        if self._values is not None and self._device is None:
            self._values = self._values.to(device)

    def state_dict(self) -> dict[str, Any]:
        """Return the values."""
        return {"values": None if self._values is None else self._values[: self._size].clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the values back."""
        values, device = state["values"], self._device
        if device is None and self._values is not None:
            device = self._values.device
        self._values = None if values is None else values.clone() if device is None else values.to(device, copy=True)
        self._size = 0 if values is None else len(values)

    def _grown(self, slots: Tensor, like: Tensor) -> Tensor:
        room = 0 if self._values is None else len(self._values)
        needed = int(slots.max()) + 1 if len(slots) else 0
        self._size = max(self._size, needed)
        device = self._device or like.device
        if self._values is None or self._values.device != device or needed > room:
            # By a quarter more: the first epoch meets ever larger numbers.
            grown = torch.zeros(max(needed + needed // 4, room), *like.shape[1:], dtype=like.dtype, device=device)
            if self._values is not None:
                grown[:room] = self._values.to(device)
            self._values = grown
        return self._values
