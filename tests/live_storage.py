"""How many bytes of tensors live at once: what a test says about memory, on any device."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorage(TorchDispatchMode):
    """Counts the storages that operations make while it is entered, until the last tensor on each is gone.

    What was there before is not counted, nor are views of it and steps in place. Memory that a kernel uses inside one
    operation is not seen. What autograd keeps for a backward pass is, for it keeps tensors.

    Attributes:
        now: bytes that are alive.
        peak: the most that were alive at once, since the beginning or the last `reset_peak`.

    Example:
        >>> x = torch.zeros(100)
        >>> with LiveStorage() as live:
        ...     y = (x + 1).square()
        >>> live.now, live.peak
        (400, 800)
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        # By identity, which a weak reference guards: its callback removes the entry before the address is used again.
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def reset_peak(self) -> None:
        """Begin to look for the peak anew."""
        self.peak = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in tree_leaves((args, kwargs)):
            self._see(tensor, made=False)
        results = func(*args, **kwargs)
        # A lazy copy has no memory of its own until it is written to, which is then missed.
        is_made = func is not torch.ops.aten._lazy_clone.default
        for tensor in tree_leaves(results):
            self._see(tensor, made=is_made)
        return results

    def _see(self, tensor: object, *, made: bool) -> None:
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided or tensor._is_zerotensor():
            return
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._storages:
            return
        size = storage.nbytes() if made else 0

        def forget(_: object) -> None:
            del self._storages[key]
            self.now -= size

        self._storages[key] = weakref.ref(storage, forget)
        self.now += size
        self.peak = max(self.peak, self.now)
