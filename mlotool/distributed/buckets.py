"""Many tensors as few: exchanging one large tensor costs less than exchanging its parts."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

BUCKET_BYTES = 25 * 2**20
"""What one all-reduce carries; the next bucket is packed while it is under way."""


def buckets(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return the positions of the tensors that travel together: of one dtype and device, in order.

    Example:
        >>> buckets([torch.zeros(3), torch.zeros(2, dtype=torch.int64), torch.zeros(())])
        [[0, 2], [1]]
    """
    open_buckets: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    closed: list[list[int]] = []
    for number, tensor in enumerate(tensors):
        kind = tensor.dtype, tensor.device
        numbers, filled = open_buckets.get(kind, ([], 0))
        size = tensor.numel() * tensor.element_size()
        if numbers and filled + size > BUCKET_BYTES:
            closed.append(numbers)
            numbers, filled = [], 0
        open_buckets[kind] = [*numbers, number], filled + size
    return closed + [numbers for numbers, _ in open_buckets.values()]


def begin_exchange(
    tensors: Sequence[Tensor],
    begin: Callable[[Tensor], Callable[[], object]],
) -> Callable[[], list[Tensor]]:
    """Begin an exchange that works in place on 1-D tensors; `tensors` themselves stay as they are.

    Args:
        tensors: of any shapes.
        begin: begins the exchange of a flat tensor, and returns what waits for its end.

    Returns:
        What waits for all of it, and returns tensors of the same shapes, in order: views of the buckets.

    Example:
        >>> def doubled(flat):
        ...     flat.mul_(2)
        ...     return lambda: None
        >>> begin_exchange([torch.ones(2), torch.ones(1, 1)], doubled)()
        [tensor([2., 2.]), tensor([[2.]])]
    """
    waiting = []
    for numbers in buckets(tensors):
        flat = torch.cat([tensors[number].detach().reshape(-1) for number in numbers])
        waiting.append((numbers, flat, begin(flat)))

    def finish() -> list[Tensor]:
        found = list(tensors)
        for numbers, flat, wait in waiting:
            wait()
            start = 0
            for number in numbers:
                like = tensors[number]
                found[number] = flat[start : start + like.numel()].view(like.shape)
                start += like.numel()
        return found

    return finish
