"""What is kept of the steps of an unroll until they are differentiated: memory against steps that are taken again."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from math import comb

from mlotool.core.arguments import require, require_fields

_EXPECTED = "a whole number of at least 1"


@dataclass(frozen=True)
class AbstractStepStore(ABC):
    """Which steps keep parameters and optimizer state (a checkpoint), and where.

    Batches and random states of all steps are kept in any case.

    Args:
        offload: keep them in the host's memory, pinned, until they are needed; on a CPU they are there anyway.

    Example:
        >>> @dataclass(frozen=True)
        ... class Odd(AbstractStepStore):
        ...     def keeps(self, number, num_steps):
        ...         return number == 0 or number % 2 == 1
        >>> [Odd().keeps(number, 4) for number in range(4)]
        [True, True, False, True]
    """

    offload: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        require_fields("hypergradient.trajectory", self)

    @property
    def saves_gradients(self) -> bool:
        """Whether the gradients of the steps are kept, so that they are taken again by the update alone."""
        return True

    @property
    def is_whole(self) -> bool:
        """Whether every step is a checkpoint."""
        return False

    @abstractmethod
    def keeps(self, number: int, num_steps: int) -> bool:
        """Return whether a step is a checkpoint; the first one is.

        Args:
            number: of the step in its unroll, from 0.
            num_steps: of an unroll.
        """

    def num_free(self, num_steps: int, num_kept: int) -> int:
        """Return how many checkpoints more may be held while steps are taken again.

        Args:
            num_steps: that are to be taken again, one after the other.
            num_kept: checkpoints that are held.
        """
        return num_steps


@dataclass(frozen=True)
class KeepAll(AbstractStepStore):
    """Every step is a checkpoint: nothing is taken again.

    Example:
        >>> KeepAll().keeps(3, 8)
        True
    """

    @property
    def saves_gradients(self) -> bool:
        """None is needed."""
        return False

    @property
    def is_whole(self) -> bool:
        """All are there."""
        return True

    def keeps(self, number: int, num_steps: int) -> bool:
        """Return true."""
        return True


@dataclass(frozen=True)
class KeepEvery(AbstractStepStore):
    """Every k-th step is a checkpoint. The gradients of all steps are kept: the rest is the update alone, to the bit.

    With Adam an unroll of T steps holds T + 3 T / k vectors of the size of the parameters, and 3 k more while they are
    differentiated, in the place of 3 T.

    Args:
        offload: keep them in the host's memory, pinned, until they are needed; on a CPU they are there anyway.
        steps: k.

    Raises:
        ConfigError: k is below 1.

    Example:
        >>> [KeepEvery(steps=3).keeps(number, 8) for number in range(5)]
        [True, False, False, True, False]
    """

    steps: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.steps >= 1, "hypergradient.trajectory.steps", self.steps, _EXPECTED)

    def keeps(self, number: int, num_steps: int) -> bool:
        """Return whether it is a k-th one."""
        return number % self.steps == 0


@dataclass(frozen=True)
class Binomial(AbstractStepStore):
    """A few checkpoints, whatever the length of the unroll; the gradients of the steps between are computed again.

    With c checkpoints, unrolls of up to (c + r choose c) steps take each step again r times at most, which is the least
    that is possible.

    Args:
        offload: keep them in the host's memory, pinned, until they are needed; on a CPU they are there anyway.
        checkpoints: c.

    Raises:
        ConfigError: c is below 1.

    Source: Griewank 1992, Achieving logarithmic growth of temporal and spatial complexity in reverse automatic
        differentiation (treeverse).

    Example:
        >>> [number for number in range(10) if Binomial(checkpoints=3).keeps(number, 10)]
        [0, 4, 7]
    """

    checkpoints: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.checkpoints >= 1, "hypergradient.trajectory.checkpoints", self.checkpoints, _EXPECTED)

    @property
    def saves_gradients(self) -> bool:
        """They would take as much as all parameters."""
        return False

    def keeps(self, number: int, num_steps: int) -> bool:
        """Return whether the first sweep over an unroll leaves a checkpoint there."""
        place = 0
        for free in range(self.checkpoints - 1, -1, -1):
            if place >= number or free == 0 or num_steps - place < 2:
                break
            place += middle(num_steps - place, free)
        return place == number

    def num_free(self, num_steps: int, num_kept: int) -> int:
        """Return what is left of c."""
        return max(0, self.checkpoints - num_kept)


def middle(num_steps: int, num_free: int) -> int:
    """Return after how many steps the next checkpoint belongs, so that the fewest steps are taken again.

    Args:
        num_steps: at least 2.
        num_free: checkpoints that may be held beside that at the beginning, at least 1.

    Example:
        >>> middle(10, 1), middle(10, 2), middle(10, 9)
        (6, 4, 1)
    """
    held, repeats = num_free + 1, 0
    while comb(held + repeats, held) < num_steps:
        repeats += 1
    # The second part has one checkpoint less, the first one repetition less; no part is shorter than it can well be.
    least = max(num_steps - comb(held - 1 + repeats, held - 1), comb(held + repeats - 2, held) if repeats > 1 else 1)
    return min(max(least, 1), num_steps - 1)
