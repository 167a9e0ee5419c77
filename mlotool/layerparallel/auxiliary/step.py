"""One training step, as all stages see it, and which samples it has."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mlotool.core.arguments import require
from mlotool.layerparallel.auxiliary.settings import AuxiliarySettings
from mlotool.layerparallel.partition.stage import Inputs
from mlotool.problem.batches import bounds

# s: samples of a batch

_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class StageStep:
    """What all stages have to know of one training step: its inputs, the shapes between stages, and its weights.

    Args:
        settings: how the stages are trained.
        number: of the step, from 0.
        inputs: of the whole module.
        shapes: of one sample's state at the interfaces 1 .. K - 1; interface k lies between the stages k - 1 and k.
        dtype: of the states.
        device: of the states.
        share: weight of this process's part of the batch: its share of the samples times `num_replicas`, 1 where all
            parts are equal.
        num_replicas: how many parts the batch has.
        slots: (s,) on the CPU, where the samples' variables are stored; None where none are stored.
        unseen: (s,), which of the samples have no stored variables yet; None where none are stored.

    Example:
        >>> settings, inputs, shapes = AuxiliarySettings(stages=2), (torch.zeros(4, 2),), [torch.Size([5])]
        >>> step = StageStep(settings, 0, inputs, shapes, torch.float32, torch.device("cpu"))
        >>> step.blank(interface=1).shape, step.weight(interface=1)
        (torch.Size([4, 5]), 0.05)
    """

    settings: AuxiliarySettings
    number: int
    inputs: Inputs
    shapes: Sequence[torch.Size]
    dtype: torch.dtype
    device: torch.device
    share: float = 1.0
    num_replicas: int = 1
    slots: Tensor | None = None
    unseen: Tensor | None = None

    @property
    def size(self) -> int:
        """s, the number of samples in the inputs."""
        size = num_rows(self.inputs)
        return 1 if size is None else size

    @property
    def collects_statistics(self) -> bool:
        """Whether a serial pass collects BatchNorm's running statistics in this step."""
        every = self.settings.recalibrate
        return bool(every) and self.number % every == 0

    @property
    def num_collected(self) -> int:
        """Serial passes that have collected running statistics before."""
        return self.number // (self.settings.recalibrate or 1)

    @property
    def is_serial(self) -> bool:
        """Whether the batch has to pass through all stages one after the other before they run at the same time."""
        return self.collects_statistics or (self.unseen is not None and bool(self.unseen.any()))

    def beta(self, interface: int) -> float:
        """Return the penalty coefficient of an interface."""
        return self.settings.betas[interface - 1].at(self.number)

    def weight(self, interface: int) -> float:
        """Return c of an interface in the stages' losses, whose gradients are averaged over the replicas afterwards."""
        if self.settings.reduction == "sum":
            return float(self.num_replicas) if self.share else 0.0
        return self.share / (self.size * self.shapes[interface - 1].numel())

    def step_size(self, interface: int) -> float:
        """Return the step size of the variables of an interface, at the rate 1; 0 for a part without samples."""
        if not self.share:
            return 0.0
        # Each variable belongs to one replica, so they are not averaged.
        return self.settings.step_size(self.beta(interface), self.weight(interface) / self.num_replicas)

    def rows(self, replica: int) -> tuple[int, int]:
        """Return the row of the whole batch at which a replica's part begins, and how many rows the batch has."""
        if not self.share:
            return 0, self.size
        size = round(self.size * self.num_replicas / self.share)
        return bounds(size, replica, self.num_replicas)[0], size

    def blank(self, interface: int) -> Tensor:
        """Return an uninitialised state at an interface, (s, ...)."""
        return torch.empty((self.size, *self.shapes[interface - 1]), dtype=self.dtype, device=self.device)


def num_rows(inputs: Inputs) -> int | None:
    """Return the number of samples in a module's inputs; None where no tensor has rows.

    Example:
        >>> num_rows((None, torch.ones(4, 2)))
        4
    """
    return next((len(value) for value in inputs if isinstance(value, Tensor) and value.ndim), None)


class Samples:
    """Numbers the samples of a data set and the augmented copies of each, and remembers which have been seen.

    Args:
        num_copies: augmented copies of each sample; copy c of sample n has the number `n num_copies + c`.

    Example:
        >>> samples = Samples(num_copies=2)
        >>> slots = samples.slots({"index": torch.tensor([3, 0]), "copy": torch.tensor([1, 0])}, "parallel")
        >>> slots, samples.meet(slots, slots), samples.meet(slots, slots)
        (tensor([7, 0]), tensor([True, True]), tensor([False, False]))
    """

    def __init__(self, num_copies: int) -> None:
        self._num_copies = num_copies
        self.seen = torch.zeros(0, dtype=torch.bool)

    def slots(self, batch: Any, key: str) -> Tensor:
        """Return the numbers of a batch's samples, (s,), on the CPU.

        Args:
            batch: has an `index`, and a `copy` where there are several.
            key: of the setting, for messages.

        Raises:
            ConfigError: it has not.
        """
        for name in ("index",) if self._num_copies == 1 else ("index", "copy"):
            value = batch.get(name) if isinstance(batch, Mapping) else None
            is_right = isinstance(value, Tensor) and value.ndim == 1 and value.dtype in _WHOLE and int(value.min()) >= 0
            expected = "a whole number of at least 0 a sample, as variables=stored needs"
            advice = f"Return 'index': index from __getitem__, or set {key}.variables=auxnet."
            require(is_right, f"{key}: the batch's '{name}'", value, expected, advice)
        slots: Tensor = batch["index"].cpu()
        if "copy" not in batch:
            return slots
        copy = batch["copy"].cpu()
        largest, advice = int(copy.max()), f"Set {key}.copies to data.augment."
        expected = f"more than {largest}, the number of a copy in the batch"
        require(largest < self._num_copies, f"{key}.copies", self._num_copies, expected, advice)
        return slots * self._num_copies + copy

    def meet(self, own: Tensor, everybody: Tensor) -> Tensor:
        """Return which samples are seen for the first time, (s,), and remember all.

        Args:
            own: numbers of this part of the batch, (s,).
            everybody: numbers of all parts.
        """
        missing = max(int(everybody.max()) + 1 - len(self.seen), 0)
        self.seen = torch.cat([self.seen, torch.zeros(missing, dtype=torch.bool)])
        unseen = ~self.seen[own]
        self.seen[everybody] = True
        return unseen
