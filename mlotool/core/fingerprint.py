"""Two numbers of a tensor, by which one can tell later whether another one is the same up to rounding."""

from collections.abc import Iterator

import torch
from torch import Tensor

_CHUNK = 1 << 18
"""Entries that are taken in float64 at once: 2 MiB, whatever the tensor's size is."""

# Some kernels of torch have constants of fp32 in float64 too (hardsigmoid), which two ways to a value meet differently.
_TOLERANCES = {torch.float64: 1e-7, torch.complex128: 1e-7, torch.float32: 2e-3, torch.complex64: 2e-3}
_TOLERANCE_IN_SHORT = 3e-2
"""Of bf16 and fp16; above what kernels differ by that add up in any order."""


def fingerprint(tensor: Tensor) -> Tensor:
    """Return the inner product of a tensor with a fixed one, and its norm, (2,) in float64, without a derivative.

    What is no finite number counts as zero.

    Args:
        tensor: of any dtype and layout in memory.

    Example:
        >>> fingerprint(torch.ones(2))
        tensor([1.5000, 1.4142], dtype=torch.float64)
    """
    with torch.no_grad():
        there = tensor.detach()
        flat = torch.view_as_real(there.resolve_conj()) if there.is_complex() else there
        found = torch.zeros(2, dtype=torch.float64, device=flat.device)
        begin, count = 0, max(flat.numel(), 1)
        for part in _parts(flat):
            values = part.reshape(-1).double().nan_to_num(0.0, 0.0, 0.0)
            end = begin + values.numel()
            ramp = torch.arange(begin, end, dtype=values.dtype, device=values.device).div_(count).add_(0.5)
            found += torch.stack([values @ ramp, values @ values])
            begin = end
        found[1].sqrt_()
    return found


def tolerance(dtype: torch.dtype) -> float:
    """Return by how much, beside the norm, two evaluations may differ by rounding.

    Args:
        dtype: of the results; integers are the same.

    Example:
        >>> tolerance(torch.float64)
        1e-09
    """
    is_real = dtype.is_floating_point or dtype.is_complex
    return _TOLERANCES.get(dtype, _TOLERANCE_IN_SHORT) if is_real else 1e-9


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a tensor in parts of few entries, in the order of its entries; a whole copy is made of none."""
    if tensor.numel() <= _CHUNK:
        yield tensor
    elif len(tensor) == 1:
        yield from _parts(tensor[0])
    else:
        num_rows = max(1, _CHUNK * len(tensor) // tensor.numel())
        for part in tensor.split(num_rows):
            yield from [part] if part.numel() <= _CHUNK else _parts(part)
