"""A rank's share of a global batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mlotool.core.loss_output import LossOutput


@dataclass(frozen=True)
class Share:
    """A batch that is not a rank's equal share of the global one.

    Where ranks have n_r of N samples, the mean over R ranks of `weight * C_r`, with `weight = n_r R / N`, is the loss
    of the joined batch, if C is a mean over samples; so are the means of all its derivatives.

    Args:
        batch: this rank's samples.
        weight: of their loss; 1 is an equal share.
    """

    batch: Any
    weight: float

    @staticmethod
    def opened(batch: Any) -> tuple[Any, float]:
        """Return the samples of a batch and their weight, which is 1 where it is no Share."""
        return (batch.batch, batch.weight) if isinstance(batch, Share) else (batch, 1.0)

    @staticmethod
    def weigh(output: LossOutput, weight: float) -> LossOutput:
        """Return a loss and its metrics times a weight."""
        if weight == 1.0:
            return output
        return LossOutput(
            output.loss * weight, lambda: {name: value * weight for name, value in output.metrics.items()}
        )


def bounds(size: int, rank: int, num_ranks: int) -> tuple[int, int, float]:
    """Return where a rank's part of `size` samples begins and ends, and its weight.

    Of fewer samples than ranks some ranks get the first one with weight 0: a loss needs a sample.

    Example:
        >>> [bounds(5, rank, 2) for rank in range(2)], bounds(1, 0, 2)
        ([(0, 2, 0.8), (2, 5, 1.2)], (0, 1, 0.0))
    """
    begin, end = size * rank // num_ranks, size * (rank + 1) // num_ranks
    weight = (end - begin) * num_ranks / size
    return (begin, end, weight) if end > begin else (0, 1, 0.0)


def sliced(batch: Any, begin: int, end: int) -> Any:
    """Return the samples from `begin` to `end` of a collated batch."""
    if isinstance(batch, Tensor):
        return batch[begin:end]
    if isinstance(batch, Mapping):
        return {key: sliced(value, begin, end) for key, value in batch.items()}
    if isinstance(batch, tuple):
        parts = [sliced(value, begin, end) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else tuple(parts)
    if isinstance(batch, Sequence):
        return batch[begin:end]
    raise TypeError(
        f"A batch of {type(batch).__name__} cannot be divided among ranks; expected tensors, mappings, tuples or "
        "lists. Use runner.devices=1, or a data set that is not `seeded`."
    )
