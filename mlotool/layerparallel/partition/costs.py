"""What a part of a module costs in a training step: operations that are counted, or seconds that are measured."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from mlotool.core.private import TorchDispatchMode, tree_leaves

ELEMENT_COST = 16
"""Floating-point operations in the time in which one number is read or written, fitted to the layers of a ResNet-18 and
of a transformer on a CPU (float32, one thread: 13); it weighs norms, activations and embeddings against products."""

NUM_TIMINGS = 3

Measure = Callable[[Callable[[], Any], torch.device], float]
"""`measure(run, device)`: what it costs to call `run`."""


class OperationCounter(TorchDispatchMode):
    """Counts what is computed while it is entered, backward passes included.

    Attributes:
        products: floating-point operations of convolutions, products of matrices and attention.
        elements: numbers that all operations read and write.

    Example:
        >>> with OperationCounter() as counter:
        ...     _ = (torch.ones(2, 3) @ torch.ones(3, 4)).relu()
        >>> counter.products, counter.elements  # relu: 8 in, 8 out; the product: 6 and 12 in, 8 out; two ones
        (48, 60)
    """

    def __init__(self) -> None:
        super().__init__()
        self.products = 0
        self.elements = 0

    @property
    def total(self) -> int:
        """Both, in floating-point operations."""
        return self.products + ELEMENT_COST * self.elements

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run and count one operation; a view costs nothing."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not any(output.alias_info is not None and not output.alias_info.is_write for output in func._schema.returns):
            count = flop_registry.get(func._overloadpacket)
            self.products += int(count(*args, **kwargs, out_val=result)) if count is not None else 0
            leaves = tree_leaves((args, kwargs, result))
            self.elements += sum(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor))
        return result


def operations(run: Callable[[], Any], device: torch.device) -> int:
    """Return the operations of a call: the same on each machine.

    Args:
        run: is called once.
        device: on which it computes; not looked at.

    Example:
        >>> operations(lambda: torch.ones(4), torch.device("cpu"))
        64
    """
    with OperationCounter() as counter:
        run()
    return counter.total


def seconds(run: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of a call, the least of a few.

    Args:
        run: is called a few times.
        device: on which it computes.

    Example:
        >>> seconds(lambda: None, torch.device("cpu")) < 1
        True
    """
    times = []
    for _ in range(NUM_TIMINGS + 1):
        _wait(device)
        begin = time.perf_counter()
        run()
        _wait(device)
        times.append(time.perf_counter() - begin)
    # The first call finds its kernels.
    return min(times[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
