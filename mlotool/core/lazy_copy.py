"""Copies of buffers that take memory only once they, or what they are copies of, are written to.

An evaluation gets copies of a module's buffers, since it might move them. Most large ones it only reads: causal masks,
tables of positions. A graph holds what it was made with, so that copies of all blocks' masks would live as long as it.
"""

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from mlotool.core.tracing import is_tracing

_LEAST_BYTES = 1 << 14
"""Below this a copy costs nothing, and the addresses of small buffers stay as they are."""

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


def lazy_copy(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor.

    On a CPU torch copies the memory where a kernel is about to write to one of them, whether it counts a version or
    not. It does not see who writes by an address that was taken before, as a numpy array on the tensor's memory. On
    other devices the copy is made at once: `torch._foreach_add_` and its like write there past what torch sees.

    Args:
        tensor: without a graph.

    Example:
        >>> large = torch.zeros(1 << 14)
        >>> copy = lazy_copy(large)
        >>> share_memory(copy, large), bool(copy.add_(1.0).any()), bool(large.any()), share_memory(copy, large)
        (True, True, False, False)
    """
    if tensor.layout != torch.strided or tensor.nbytes < _LEAST_BYTES:
        return tensor.clone()
    is_plain = type(tensor) in _PLAIN and tensor.device.type == "cpu" and not is_functorch_wrapped_tensor(tensor)
    if not is_plain or is_tracing():
        return tensor.clone()
    try:
        return torch._lazy_clone(tensor)
    except RuntimeError:
        # Memory that is not torch's: of numpy, of a file, shared with other processes.
        return tensor.clone()


def share_memory(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are the same part of the same memory, so that neither has been written to.

    Args:
        a: a tensor that may be a lazy copy of the other.
        b: the other.

    Example:
        >>> rows = torch.zeros(2, 1)
        >>> share_memory(torch.zeros(1), torch.zeros(1)), share_memory(rows[0], rows[1])
        (False, False)
    """
    if is_functorch_wrapped_tensor(a) or is_functorch_wrapped_tensor(b) or a.is_meta or b.is_meta:
        return a is b
    if a.layout != torch.strided or b.layout != torch.strided:
        # A sparse tensor has several pieces of memory.
        return a is b
    # `data_ptr()` would copy: its caller might write there.
    addresses = [torch._C._data_address(each) for each in (a, b)]  # type: ignore[attr-defined]
    return addresses[0] == addresses[1] and _place(a) == _place(b)


def _place(tensor: Tensor) -> tuple[object, ...]:
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
