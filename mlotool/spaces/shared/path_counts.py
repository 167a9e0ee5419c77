"""How often each candidate of a shared space was computed in training."""

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from mlotool.core.tracing import is_tracing
from mlotool.spaces.decisions import Value
from mlotool.spaces.shared.path_table import SharedDecision

COUNTS = "counts"
"""The buffer of the space."""

MAX_KEPT = 4096
"""Of what was taken, whose counts are kept."""

Taken = tuple[tuple[str, tuple[Value, ...]], ...]
"""By decision, the candidates that are computed for it."""


class PathCounts:
    """Counts the candidates that calls compute, in one buffer of a space.

    The buffer moves in live training steps alone: all other evaluations of a program have copies of the buffers.

    Args:
        space: gets the buffer `counts`, (candidates of all decisions,), int64.
        decisions: of the space, by whose order the buffer is filled.
    """

    def __init__(self, space: nn.Module, decisions: Sequence[SharedDecision]) -> None:
        starts = accumulate((len(each.candidates) for each in decisions), initial=0)
        self._numbers: dict[str, dict[Value, int]] = {
            each.name: {value: start + number for number, value in enumerate(each.candidates)}
            for each, start in zip(decisions, starts, strict=False)
        }
        total = sum(map(len, self._numbers.values()))
        space.register_buffer(COUNTS, torch.zeros(total, dtype=torch.int64))
        # By what was taken, 1 for each candidate: adding it is one kernel a call.
        self._ones: dict[tuple[Taken, torch.device], Tensor] = {}

    def add(self, counts: Tensor, taken: Taken) -> None:
        """Count one call.

        Args:
            counts: the buffer.
            taken: what it computes.
        """
        key = taken, counts.device
        if key in self._ones:
            counts.add_(self._ones[key])
            return
        # A list, as a function that follows tensors (torch.vmap, a trace) would keep those that are made within.
        indices = {self._numbers[name][each] for name, values in taken for each in values}
        ones = torch.tensor([int(number in indices) for number in range(len(counts))], device=counts.device)
        counts.add_(ones)
        if type(ones) is Tensor and not is_tracing() and not is_functorch_wrapped_tensor(ones):
            if len(self._ones) >= MAX_KEPT:
                self._ones.clear()
            self._ones[key] = ones

    def by_candidate(self, counts: Tensor) -> Mapping[str, Mapping[Value, int]]:
        """Return the counts by decision and candidate."""
        found = counts.tolist()
        return {
            name: {value: int(found[number]) for value, number in numbers.items()}
            for name, numbers in self._numbers.items()
        }
