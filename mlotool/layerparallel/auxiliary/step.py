"""One training step, as all stages see it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mlotool.layerparallel.partition import Inputs
from mlotool.problem.batch_share import bounds


@dataclass(frozen=True)
class StageStep:
    """What a step is about.

    Args:
        inputs: of the whole module.
        size: number of samples s in them.
        shapes: of one sample's state at the interfaces 1 .. K - 1.
        dtype: of the states.
        device: of the states.
        beta: the penalty coefficient.
        reduction: `mean` or `sum`, of the penalties.
        share: weight of this part of the batch among the replicas; 1 is an equal one.
        num_replicas: how many parts the batch has.
        slots: where the samples' variables are stored, (s,), on the CPU; None where none are.
        unseen: which of the samples have no stored variables yet, (s,); None where none are stored.
        moves_buffers: whether running statistics are collected by a serial pass, and only by it, in this step.
        freezes_buffers: whether the stages' own passes leave them alone.
        num_collected: serial passes that have collected running statistics before.
    """

    inputs: Inputs
    size: int
    shapes: Sequence[torch.Size]
    dtype: torch.dtype
    device: torch.device
    beta: float
    reduction: str
    share: float = 1.0
    num_replicas: int = 1
    slots: Tensor | None = None
    unseen: Tensor | None = None
    moves_buffers: bool = False
    freezes_buffers: bool = False
    num_collected: int = 0

    @property
    def is_serial(self) -> bool:
        """Whether the batch has to pass through all stages one after the other first."""
        return self.moves_buffers or (self.unseen is not None and bool(self.unseen.any()))

    def weight(self, interface: int) -> float:
        """Return c of an interface: of the losses, whose gradients are then averaged over the replicas."""
        if self.reduction == "sum":
            return float(self.num_replicas)
        return self.share / (self.size * self.shapes[interface - 1].numel())

    def own_weight(self, interface: int) -> float:
        """Return c of an interface for the variables, of which each replica has its own samples'."""
        return self.weight(interface) / self.num_replicas

    def rows(self, replica: int) -> tuple[int, int]:
        """Return where a replica's part begins in the whole batch, and the size of that."""
        if not self.share:
            return 0, self.size
        size = round(self.size * self.num_replicas / self.share)
        return bounds(size, replica, self.num_replicas)[0], size

    def blank(self, interface: int) -> Tensor:
        """Return an uninitialised state at an interface, (s, ...)."""
        return torch.empty((self.size, *self.shapes[interface - 1]), dtype=self.dtype, device=self.device)
