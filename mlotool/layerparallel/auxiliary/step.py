"""One training step, as all stages see it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mlotool.layerparallel.partition import Inputs
from mlotool.problem.batches import bounds


@dataclass(frozen=True)
class BufferMoves:
    """Which passes of a step move BatchNorm's running statistics.

    Args:
        in_serial_pass: a serial pass collects them in this step.
        in_stages: the stages' own passes move them.
        num_collected: serial passes that have collected them before.

    Example:
        >>> BufferMoves.of(recalibrate=5, num_steps=10)
        BufferMoves(in_serial_pass=True, in_stages=False, num_collected=2)
    """

    in_serial_pass: bool = False
    in_stages: bool = True
    num_collected: int = 0

    @classmethod
    def of(cls, recalibrate: int, num_steps: int) -> "BufferMoves":
        """Return those of a step.

        Args:
            recalibrate: steps between two serial passes that collect them; 0 leaves that to the stages' passes.
            num_steps: taken before.
        """
        if not recalibrate:
            return cls()
        return cls(num_steps % recalibrate == 0, False, num_steps // recalibrate)


@dataclass(frozen=True)
class StageStep:
    """What all stages have to know of one training step: its inputs, the shapes between stages, and its weights.

    Args:
        inputs: of the whole module.
        size: s, the number of samples in the inputs.
        shapes: of one sample's state at the interfaces 1 .. K - 1; interface k lies between the stages k - 1 and k.
        dtype: of the states.
        device: of the states.
        betas: the penalty coefficients of the interfaces 1 .. K - 1.
        reduction: `mean` or `sum`, of the penalties over the elements of a batch.
        share: weight of this process's part of the batch: its share of the samples times `num_replicas`, 1 where all
            parts are equal.
        num_replicas: how many parts the batch has.
        slots: (s,) on the CPU, where the samples' variables are stored; None where none are stored.
        unseen: (s,), which of the samples have no stored variables yet; None where none are stored.
        buffers: which passes move running statistics.
        number: of the step, from 0.

    Example:
        >>> inputs, shapes = (torch.zeros(4, 2),), [torch.Size([5])]
        >>> step = StageStep(inputs, 4, shapes, torch.float32, torch.device("cpu"), betas=[10.0], reduction="mean")
        >>> step.blank(interface=1).shape, step.weight(interface=1)
        (torch.Size([4, 5]), 0.05)
    """

    inputs: Inputs
    size: int
    shapes: Sequence[torch.Size]
    dtype: torch.dtype
    device: torch.device
    betas: Sequence[float]
    reduction: str
    share: float = 1.0
    num_replicas: int = 1
    slots: Tensor | None = None
    unseen: Tensor | None = None
    buffers: BufferMoves = BufferMoves()
    number: int = 0

    @property
    def is_serial(self) -> bool:
        """Whether the batch has to pass through all stages one after the other before they run at the same time."""
        return self.buffers.in_serial_pass or (self.unseen is not None and bool(self.unseen.any()))

    def beta(self, interface: int) -> float:
        """Return the penalty coefficient of an interface."""
        return self.betas[interface - 1]

    def weight(self, interface: int) -> float:
        """Return c of an interface in the stages' losses, whose gradients are averaged over the replicas afterwards."""
        if self.reduction == "sum":
            return float(self.num_replicas) if self.share else 0.0
        return self.share / (self.size * self.shapes[interface - 1].numel())

    def own_weight(self, interface: int) -> float:
        """Return c of an interface for auxiliary variables: each belongs to one replica, so they are not averaged."""
        return self.weight(interface) / self.num_replicas

    def rows(self, replica: int) -> tuple[int, int]:
        """Return the row of the whole batch at which a replica's part begins, and how many rows the batch has."""
        if not self.share:
            return 0, self.size
        size = round(self.size * self.num_replicas / self.share)
        return bounds(size, replica, self.num_replicas)[0], size

    def blank(self, interface: int) -> Tensor:
        """Return an uninitialised state at an interface, (s, ...)."""
        return torch.empty((self.size, *self.shapes[interface - 1]), dtype=self.dtype, device=self.device)
