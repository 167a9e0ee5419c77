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

    torch copies the memory where a kernel is about to write to one of them, whether it counts a version or not. It does
    not see who writes by an address that was taken before, as a numpy array on the tensor's memory.

    Args:
        tensor: without a graph.

    Example:
        >>> large = torch.zeros(1 << 14)
        >>> copy = lazy_copy(large)
        >>> share_memory(copy, large), bool(copy.add_(1.0).any()), bool(large.any()), share_memory(copy, large)
        (True, True, False, False)
    """
    is_plain = type(tensor) in _PLAIN and tensor.layout == torch.strided and tensor.device.type in ("cpu", "cuda")
    if not is_plain or tensor.nbytes < _LEAST_BYTES or is_functorch_wrapped_tensor(tensor) or is_tracing():
        return tensor.clone()
    try:
        return torch._lazy_clone(tensor)
    except RuntimeError:
        # Memory that is not torch's: of numpy, of a file, shared with other processes.
        return tensor.clone()


def share_memory(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of one shape are the same memory, so that neither has been written to.

    Args:
        a: a tensor that may be a lazy copy of the other.
        b: the other.

    Example:
        >>> share_memory(torch.zeros(1), torch.zeros(1))
        False
    """
    if is_functorch_wrapped_tensor(a) or is_functorch_wrapped_tensor(b) or a.is_meta:
        return a is b
    # `data_ptr()` would copy: its caller might write there.
    addresses = [torch._C._data_address(each) for each in (a, b)]  # type: ignore[attr-defined]
    return addresses[0] == addresses[1] and a.stride() == b.stride()
