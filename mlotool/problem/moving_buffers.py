"""The buffers of a module before each recorded evaluation, so that it can be evaluated again as it was.

Spectral norms, and BatchNorm in eval mode, read buffers that training steps move. A step that is computed again would
read today's.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from mlotool.core.lazy_copy import lazy_copy, share_memory
from mlotool.core.slots import Slot

Buffers = Mapping[str, Tensor]
"""Copies by name, of those that move."""


class MovingBuffers:
    """Copies those buffers of a module that move from one evaluation to the next: what stays is not copied.

    One that stays at first is copied from the first evaluation on that comes after its first change.

    Args:
        module: its structure must stay as it is.

    Example:
        >>> layer = nn.BatchNorm1d(1)
        >>> buffers = MovingBuffers(layer)
        >>> before = buffers.now()
        >>> _ = layer(torch.tensor([[1.0], [3.0]]))
        >>> before["running_mean"], buffers.now()["running_mean"]
        (tensor([0.]), tensor([0.2000]))
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._slots = _slots(module)
        norms = {id(each._buffers) for each in module.modules() if isinstance(each, _NormBase)}
        self._statistics: dict[int, list[str]] = {}
        for name, (holder, _) in self._slots.items():
            if id(holder) in norms:
                self._statistics.setdefault(id(holder), []).append(name)
        # The tensors too: another one may get the place of one that is gone.
        self._marks: list[tuple[Tensor, int]] = []
        self._first: dict[str, Tensor] = {}
        self._moving: set[str] = set()

    def now(self) -> Buffers:
        """Return copies, one evaluation after the other."""
        if not self._slots:
            return {}
        marks = [(holder[key], holder[key]._version) for holder, key in self._slots.values()]
        if not self._marks:
            # Which ones move is seen at the next call; what stays is then dropped from these.
            self._first = {name: lazy_copy(holder[key]) for name, (holder, key) in self._slots.items()}
            self._marks = marks
            return self._first
        if self._first:
            still = [name for name, copy in self._first.items() if self._is_as_before(name, copy)]
            self._moving.update(self._first.keys() - still)
            for name in still:
                del self._first[name]
            self._first = {}
        for (name, (holder, _)), a, b in zip(self._slots.items(), self._marks, marks, strict=True):
            if a[0] is not b[0] or a[1] != b[1]:
                # A kernel that moves statistics does not count a version, but BatchNorm counts its batches.
                self._moving.update(self._statistics.get(id(holder), (name,)))
        self._marks = marks
        return {name: self._current(name).clone() for name in self._slots if name in self._moving}

    def _is_as_before(self, name: str, copy: Tensor) -> bool:
        now = self._current(name)
        # Of sparse ones identity and version alone tell.
        return now.layout != torch.strided or share_memory(copy, now) or torch.equal(copy, now)

    def _current(self, name: str) -> Tensor:
        holder, key = self._slots[name]
        return holder[key]


@contextmanager
def buffers_in_place(module: nn.Module | None, buffers: Buffers) -> Iterator[None]:
    """Put buffers into the places of a module's own for a while.

    Args:
        module: of which they are; any where there are none.
        buffers: by name.

    Example:
        >>> layer = nn.BatchNorm1d(1)
        >>> with buffers_in_place(layer, {"running_mean": torch.ones(1)}):
        ...     layer.running_mean
        tensor([1.])
        >>> layer.running_mean
        tensor([0.])
    """
    if module is None or not buffers:
        yield
        return
    places = []
    for name, value in buffers.items():
        path, _, key = name.rpartition(".")
        places.append((module.get_submodule(path)._buffers, key, value))
    own = [holder[key] for holder, key, _ in places]
    try:
        for holder, key, value in places:
            holder[key] = value
        yield
    finally:
        for (holder, key, _), before in zip(places, own, strict=True):
            holder[key] = before


def _slots(module: nn.Module) -> dict[str, Slot]:
    """Return the places of all buffers by name."""
    return {
        f"{path}.{key}" if path else key: (each._buffers, key)
        for path, each in module.named_modules()
        for key, value in each._buffers.items()
        if value is not None
    }
