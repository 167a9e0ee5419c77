"""The perturbations that persistent rollouts have had so far: their sums make the estimate unbiased."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from mlotool.hypergradient.vector import add, copies
from mlotool.problem.interface import Vector


class History(NamedTuple):
    """The sum of the directions of each pair since it began, for one reader.

    Args:
        sums: by number of the pair.
        num_rounds: gradients so far.

    Example:
        >>> import torch
        >>> history = History({}).extended([[torch.ones(2)]]).extended([[torch.ones(2)]])
        >>> history.sums[0]
        [tensor([2., 2.])]
    """

    sums: Mapping[int, Vector]
    num_rounds: int = 0

    def extended(self, directions: Sequence[Vector]) -> "History":
        """Return the history with a round's directions, one a pair, in its sums."""
        sums = dict(self.sums)
        for number, direction in enumerate(directions):
            before = sums.get(number)
            moved = None if before is None else [old.to(new) for old, new in zip(before, direction, strict=True)]
            sums[number] = list(direction) if moved is None else add(moved, direction)
        return History(sums, self.num_rounds)

    def after_round(self, is_finite: Tensor, restart_every: int | None) -> "History":
        """Return it without the pairs that begin again: those not finite, and all after `restart_every` rounds."""
        count = self.num_rounds + 1
        if restart_every is not None and count % restart_every == 0:
            return History({}, count)
        good = is_finite.tolist()
        return History({number: each for number, each in self.sums.items() if good[number]}, count)

    def state_dict(self) -> dict[str, Any]:
        """Return the sums and the count, in plain containers."""
        return {"sums": {number: list(each) for number, each in self.sums.items()}, "num_rounds": self.num_rounds}

    @classmethod
    def from_state_dict(cls, saved: Mapping[str, Any]) -> "History":
        """Return the history that was saved."""
        return cls({number: copies(each) for number, each in saved["sums"].items()}, saved["num_rounds"])
