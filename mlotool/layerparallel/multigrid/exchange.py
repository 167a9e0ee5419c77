"""What the processes that share the layers tell each other."""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from mlotool.core.errors import ConfigError
from mlotool.distributed.collectives import Ranks
from mlotool.distributed.mesh import all_ranks
from mlotool.distributed.point_to_point import hand_on
from mlotool.layerparallel.multigrid.grids import Grid


class AbstractExchange(ABC):
    """The layers are in `num_parts` equal parts, of which this process has the `part`-th.

    It relaxes its own part of the finest grid; the coarser ones, of N/c layers together, are solved by all alike.

    Attributes:
        part: from 0, in the order in which values are handed on.
        num_parts: how many there are.
    """

    part: int
    num_parts: int

    @abstractmethod
    def pass_on(self, last: Tensor) -> Tensor | None:
        """Send a part's last value to the next one, and return that of the part before; None for the first."""

    @abstractmethod
    def gather(self, own: Tensor) -> Tensor:
        """Return the values of all parts, in the order of their layers, along the first axis."""

    @abstractmethod
    def origin(self, value: Tensor) -> Tensor:
        """Return the value of the first part, which is the first one of all."""

    @abstractmethod
    def norm(self, own: Tensor) -> Tensor:
        """Return the norm of all parts from each one's."""

    def part_of(self, grid: Grid) -> range:
        """Return the points of a grid whose layers are at hand here.

        Raises:
            ConfigError: the chunks cannot be divided.
        """
        if grid.num_chunks % self.num_parts:
            raise ConfigError(
                f"num_layers: found {grid.num_layers} with coarsening={grid.coarsening} for {self.num_parts} ranks; "
                f"expected the same number of chunks of {grid.coarsening} layers on each. Set num_layers to a multiple "
                f"of {self.num_parts * (grid.coarsening or 1)}, or take another number of ranks."
            )
        size = grid.num_layers // self.num_parts
        return range(self.part * size, (self.part + 1) * size)


class Alone(AbstractExchange):
    """This process has all layers."""

    part = 0
    num_parts = 1

    def pass_on(self, last: Tensor) -> None:
        """Do nothing."""

    def gather(self, own: Tensor) -> Tensor:
        """Return what is at hand."""
        return own

    def origin(self, value: Tensor) -> Tensor:
        """Return it."""
        return value.detach()

    def norm(self, own: Tensor) -> Tensor:
        """Return it."""
        return own


class RankExchange(AbstractExchange):
    """A part of the layers on each rank of a process group, in the order of the ranks.

    Args:
        group: the ranks, as torch.distributed or `Ranks` has them.
        is_mirrored: values are handed on from the last rank to the first, as adjoints are.
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
    """Say whether there are several."""
    return all_ranks().size > 1


def exchanges() -> tuple[AbstractExchange, AbstractExchange]:
    """Return those of states and of adjoints, between all ranks."""
    return RankExchange(all_ranks()), RankExchange(all_ranks(), is_mirrored=True)
