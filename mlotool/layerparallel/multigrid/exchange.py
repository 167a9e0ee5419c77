"""What the processes that share the layers tell each other."""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from mlotool.core.errors import ConfigError
from mlotool.distributed.collectives import Ranks, all_ranks
from mlotool.distributed.point_to_point import hand_on
from mlotool.layerparallel.multigrid.grids import Grid


class AbstractExchange(ABC):
    """How processes exchange values where the layers are divided into equal parts, one for each process.

    A process relaxes its own part of the finest grid. The coarser grids, N/c layers and fewer, are solved by each
    process as a whole. "Next" and "before" are meant in the order in which a solve advances: adjoints
    begin at the last layers.

    Attributes:
        part: number of this process's part in that order, from 0.
        num_parts: how many parts there are.

    Example:
        >>> exchange: AbstractExchange = Alone()
        >>> exchange.part_of(Grid(num_layers=16, stride=1, coarsening=4))
        range(0, 16)
    """

    part: int
    num_parts: int

    @abstractmethod
    def pass_on(self, last: Tensor) -> Tensor | None:
        """Send the last value (b, ...) of this part to the next part, and return that of the part before.

        Args:
            last: (b, ...), of one shape on all processes.

        Returns:
            (b, ...); None for the first part.
        """

    @abstractmethod
    def gather(self, own: Tensor) -> Tensor:
        """Return the values of all parts along the first axis, in the order of their layers.

        Args:
            own: (k, ...), of one shape on all processes.

        Returns:
            (num_parts k, ...).
        """

    @abstractmethod
    def origin(self, value: Tensor) -> Tensor:
        """Return what the process of the first part has given, (b, ...): the value at which the recursion begins."""

    @abstractmethod
    def norm(self, own: Tensor) -> Tensor:
        """Return the Euclidean norm () over all parts, from the norm () of each one's values."""

    def part_of(self, grid: Grid) -> range:
        """Return the points of a grid whose layers this process has.

        Raises:
            ConfigError: the chunks cannot be divided equally.
        """
        if self.num_parts > 1 and (grid.num_left or grid.num_chunks % self.num_parts):
            raise ConfigError(
                f"num_layers: found {grid.num_layers} with coarsening={grid.coarsening} for {self.num_parts} ranks; "
                f"expected the same number of chunks of {grid.coarsening} layers on each. Set num_layers to a multiple "
                f"of {self.num_parts * (grid.coarsening or 1)}, or take another number of ranks."
            )
        size = grid.num_layers // self.num_parts
        return range(self.part * size, (self.part + 1) * size)


class Alone(AbstractExchange):
    """The exchange of a process that has all layers: there is nobody to exchange with.

    Example:
        >>> exchange = Alone()
        >>> exchange.pass_on(torch.ones(2)), exchange.gather(torch.ones(3, 2)).shape
        (None, torch.Size([3, 2]))
    """

    part = 0
    num_parts = 1

    def pass_on(self, last: Tensor) -> None:
        """Return None: there is no part before."""

    def gather(self, own: Tensor) -> Tensor:
        """Return the same values, which are all there are."""
        return own

    def origin(self, value: Tensor) -> Tensor:
        """Return the same value, without a gradient."""
        return value.detach()

    def norm(self, own: Tensor) -> Tensor:
        """Return the same norm."""
        return own


class RankExchange(AbstractExchange):
    """A part of the layers on each rank of a process group, in the order of the ranks.

    Args:
        group: the ranks, as a torch.distributed group or as `Ranks`.
        is_mirrored: whether values are handed on from the last rank to the first, as adjoints are.

    Example:
        >>> exchange = RankExchange(Ranks(rank=1, size=4), is_mirrored=True)
        >>> exchange.part, exchange.part_of(Grid(num_layers=16, stride=1, coarsening=2))
        (2, range(8, 12))
    """

    def __init__(self, group: Any, is_mirrored: bool = False) -> None:
        self.ranks = group if isinstance(group, Ranks) else Ranks.of(group)
        self.is_mirrored = is_mirrored
        self.num_parts = self.ranks.size
        self.part = self._at(self.ranks.rank)

    def pass_on(self, last: Tensor) -> Tensor | None:
        """Send and receive, point to point."""
        return hand_on(self.ranks, last, is_backward=self.is_mirrored)

    def gather(self, own: Tensor) -> Tensor:
        """Gather on all ranks."""
        return torch.cat(self.ranks.gather_tensors(own))

    def norm(self, own: Tensor) -> Tensor:
        """Return the root of the sum of squares."""
        return self.ranks.total(own.square()).sqrt()

    def origin(self, value: Tensor) -> Tensor:
        """Broadcast it from the rank of that part."""
        return self.ranks.broadcast_one(value, self._at(0))

    def _at(self, part: int) -> int:
        """Return the rank of a part, and the part of a rank."""
        return self.num_parts - 1 - part if self.is_mirrored else part


def has_ranks() -> bool:
    """Say whether this run has several ranks.

    Example:
        >>> has_ranks()
        False
    """
    return all_ranks().size > 1


def exchanges() -> tuple[AbstractExchange, AbstractExchange]:
    """Return the exchange of states and that of adjoints between all ranks of the run.

    Example:
        >>> states, adjoints = exchanges()
        >>> states.num_parts, adjoints.num_parts
        (1, 1)
    """
    return RankExchange(all_ranks()), RankExchange(all_ranks(), is_mirrored=True)
