"""What pairs of persistent rollouts have behind them."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from mlotool.hypergradient.vector import add
from mlotool.problem.interface import Vector


class History:
    """The sum of the directions of each pair since it began, for one reader."""

    def __init__(self) -> None:
        self.sums: dict[int, list[Tensor]] = {}
        self.num_rounds = 0

    def extended(self, directions: Sequence[Vector]) -> list[list[Tensor]]:
        """Add a round's directions, one a pair; return the sums."""
        for number, direction in enumerate(directions):
            before = self.sums.get(number)
            moved = None if before is None else [old.to(new) for old, new in zip(before, direction, strict=True)]
            self.sums[number] = list(direction) if moved is None else add(moved, direction)
        return [self.sums[number] for number in range(len(directions))]

    def end_round(self, is_finite: Tensor, restart_every: int | None) -> None:
        """Forget the pairs that begin again: those that are not finite, and all after `restart_every` rounds."""
        self.num_rounds += 1
        if restart_every is not None and self.num_rounds % restart_every == 0:
            self.sums.clear()
        for number, good in enumerate(is_finite.tolist()):
            if not good:
                self.sums.pop(number, None)

    def state_dict(self) -> dict[str, Any]:
        """Return the sums and the count, in plain containers."""
        return {"sums": {number: list(each) for number, each in self.sums.items()}, "num_rounds": self.num_rounds}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> "History":
        """Return the state that was saved."""
        history = cls()
        history.sums = {number: [tensor.clone() for tensor in each] for number, each in state["sums"].items()}
        history.num_rounds = state["num_rounds"]
        return history
