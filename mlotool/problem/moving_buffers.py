"""The buffers of a module before each recorded evaluation, so that it can be evaluated again as it was.

Spectral norms, and BatchNorm in eval mode, read buffers that training steps move. A step that is computed again would
read today's.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from mlotool.core.bound_module import Slot, lazy_copy, share_memory

Buffers = Mapping[str, Tensor | None]
"""Copies by name; None where there was none. Of what stays, the records of all evaluations have the same copy."""

_LEAST_BYTES = 1 << 14
"""A buffer on a CPU below this is compared with its copy, in less time than it takes to look for another way."""


class MovingBuffers:
    """Copies the buffers of a module before each evaluation: those that have moved since the last one are copied anew.

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
        # The buffers too: another tensor may get the place of one that is gone.
        self._marks: dict[str, tuple[Tensor | None, int | None]] = {}
        self._copies: dict[str, Tensor | None] = {}
        # Copies that still share the memory of their buffers, and buffers that have moved on a GPU.
        self._lazy: set[str] = set()
        self._moving: set[str] = set()

    def now(self) -> Buffers:
        """Return the copies, which nobody may change."""
        moved = {name for name in self._slots if name not in self._copies or self._has_moved(name)}
        for holder in {id(self._slots[name][0]) for name in moved}:
            # A kernel that moves statistics does not count a version, but BatchNorm counts its batches.
            moved.update(self._statistics.get(holder, ()))
        for name in moved:
            now = self._current(name)
            if name in self._copies and now is not None and now.device.type != "cpu":
                self._moving.add(name)
            copy = self._copies[name] = None if now is None else lazy_copy(now.detach())
            self._marks[name] = (now, _version(now))
            is_lazy = now is not None and copy is not None and share_memory(copy, now)
            (self._lazy.add if is_lazy else self._lazy.discard)(name)
        # In the order of the module: that of a set is another one in each process, and so would checkpoints be.
        return {name: self._copies[name] for name in self._slots}

    def _has_moved(self, name: str) -> bool:
        now, copy, (before, version) = self._current(name), self._copies[name], self._marks[name]
        # A recorded sequence of kernels on a GPU moves what it moves without counting versions.
        if now is not before or _version(now) != version or name in self._moving:
            return True
        if now is None or copy is None or now.layout != torch.strided or id(self._slots[name][0]) in self._statistics:
            return False
        is_compared = now.is_inference() or (now.device.type == "cpu" and now.nbytes < _LEAST_BYTES)
        if is_compared:
            return not torch.equal(copy, now)
        # What was lazily copied and is other memory now has been written to; of what was not, the version tells.
        return name in self._lazy and not share_memory(copy, now)

    def _current(self, name: str) -> Tensor | None:
        holder, key = self._slots[name]
        return holder[key]


def _version(tensor: Tensor | None) -> int | None:
    """Return how often a tensor was changed in place; None where torch does not count."""
    return None if tensor is None or tensor.is_inference() else tensor._version


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
    """Return the places of all buffers by name, those that hold none yet included."""
    return {
        f"{path}.{key}" if path else key: (each._buffers, key)
        for path, each in module.named_modules()
        # Of a module of torch.jit they are a dictionary that iterates otherwise.
        for key in each._buffers.keys()  # noqa: SIM118
    }
