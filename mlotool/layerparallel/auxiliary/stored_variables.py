"""Auxiliary variables and multipliers that are kept in a table, by sample."""

from typing import Any

import torch
from torch import Tensor

from mlotool.layerparallel.auxiliary.equations import next_multiplier
from mlotool.layerparallel.auxiliary.settings import AuxiliarySettings
from mlotool.layerparallel.auxiliary.step import StageStep
from mlotool.layerparallel.auxiliary.variables import AbstractVariables
from mlotool.layerparallel.exchange import Transport

# s: samples of a batch, n: samples that there is room for, ...: the shape of a state


class Table:
    """A tensor for each sample of a data set; it grows to the largest sample number that it meets.

    Args:
        device: where the tensors are kept; None is where the first values are.

    Example:
        >>> table = Table()
        >>> table.put(torch.tensor([2]), torch.ones(1, 3))
        >>> table.get(torch.tensor([2, 0]), like=torch.zeros(2, 3))
        tensor([[1., 1., 1.],
                [0., 0., 0.]])
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._values: Tensor | None = None
        self._size = 0

    def get(self, slots: Tensor, like: Tensor) -> Tensor:
        """Return the values of samples, (s, ...); zeros where none have been put.

        Args:
            slots: numbers of the samples, (s,).
            like: a tensor (s, ...) of the shape, dtype and device to return.
        """
        values = self._grown(slots, like)
        return values[slots.to(values.device)].to(like.device, non_blocking=True)

    def put(self, slots: Tensor, values: Tensor) -> None:
        """Keep the values of samples.

        Args:
            slots: numbers of the samples, (s,).
            values: (s, ...), of the same shape behind s in every call.
        """
        kept = self._grown(slots, values)
        kept[slots.to(kept.device)] = values.to(kept.device)

    def to(self, device: torch.device) -> None:
        """Move the values to a device, unless the table was given a device of its own."""
        if self._values is not None and self._device is None:
            self._values = self._values.to(device)

    def state_dict(self) -> dict[str, Any]:
        """Return the values."""
        return {"values": None if self._values is None else self._values[: self._size].clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the values back."""
        values, device = state["values"], self._device
        if device is None and self._values is not None:
            device = self._values.device
        self._values = None if values is None else values.clone() if device is None else values.to(device, copy=True)
        self._size = 0 if values is None else len(values)

    def _grown(self, slots: Tensor, like: Tensor) -> Tensor:
        room = 0 if self._values is None else len(self._values)
        needed = int(slots.max()) + 1 if len(slots) else 0
        self._size = max(self._size, needed)
        device = self._device or like.device
        if self._values is None or self._values.device != device or needed > room:
            # By a quarter more: the first epoch meets ever larger numbers.
            grown = torch.zeros(max(needed + needed // 4, room), *like.shape[1:], dtype=like.dtype, device=device)
            if self._values is not None:
                grown[:room] = self._values.to(device)
            self._values = grown
        return self._values


# s: samples of a batch, ...: the shape of a state


class StoredVariables(AbstractVariables):
    """lambda_k and kappa_k of every sample, kept in tables from one visit of the sample to the next.

        lambda_k <- lambda_k - eta slope,    kappa_k <- kappa_k - rate (lambda_k - X^{k-1})

    Args:
        number: k, of the stage.
        settings: how the stages are trained.
        transport: to and from the neighbours.
        seed: of the noise on auxiliary variables.

    Source: Sun et al. 2021, arXiv 2112.05387, eq. 23, 24.

    Example:
        A sample that is seen for the first time begins where a serial pass enters the stage, here with the state 1:

        >>> settings = AuxiliarySettings(stages=2, reduction="sum")
        >>> last = StoredVariables(1, settings, Transport(), seed=0)
        >>> sample = {"slots": torch.tensor([5]), "unseen": torch.tensor([True])}
        >>> step = StageStep(settings, 0, (), [torch.Size([3])], torch.float32, torch.device("cpu"), **sample)
        >>> last.start(step, torch.ones(1, 3))
        >>> last.prepare(step)
        >>> last.own
        tensor([[1., 1., 1.]])
    """

    def __init__(self, number: int, settings: AuxiliarySettings, transport: Transport, seed: int) -> None:
        super().__init__(number, settings, transport, seed)
        device = None if settings.table_device is None else torch.device(settings.table_device)
        self._variables, self._multipliers = Table(device), Table(device)
        self._clean: Tensor | None = None
        self._multiplier: Tensor | None = None

    def start(self, step: StageStep, state: Tensor) -> None:
        """Store where a serial pass enters the stage, (s, ...), for the samples that are seen for the first time."""
        if not self.is_first and step.unseen is not None and step.slots is not None:
            self._variables.put(step.slots[step.unseen], state[step.unseen.to(state.device)])

    def prepare(self, step: StageStep) -> None:
        """Look up lambda_k and kappa_k of the batch's samples, and send them to the stage before."""
        number, send = self.number, self.transport.send
        if not self.is_first:
            assert step.slots is not None
            self._clean = self._variables.get(step.slots, step.blank(number))
            self.own = self._perturbed(step, self._clean)
            send("variable", number, number - 1, self.own)
            if self.settings.has_multipliers:
                self._multiplier = self._multipliers.get(step.slots, step.blank(number))
                send("multiplier", number, number - 1, self._multiplier)
        if not self.is_last:
            self.transport.expect("variable", number + 1, number, step.blank(number + 1))
            if self.settings.has_multipliers:
                self.transport.expect("multiplier", number + 1, number, step.blank(number + 1))

    def target(self) -> tuple[Tensor, Tensor | None]:
        """Return the lambda_{k+1} and kappa_{k+1} that the next stage has looked up."""
        receive, number = self.transport.receive, self.number
        variable = receive("variable", number + 1, number)
        return variable, receive("multiplier", number + 1, number) if self.settings.has_multipliers else None

    def multiplier(self) -> Tensor | None:
        """Return the kappa_k (s, ...) that was looked up; None is zero."""
        return self._multiplier

    def correct(self, step: StageStep, state: Tensor, slope: Tensor) -> None:
        """lambda <- lambda - eta slope, then kappa <- kappa - rate (lambda - X)."""
        assert self._clean is not None and step.slots is not None
        step_size = step.step_size(self.number)
        moved = [self._clean - step_size * slope]
        if self._multiplier is not None:
            eta = step_size * (self.settings.rate(self.number) or 1.0)
            rate = self.settings.multiplier_rate(step.beta(self.number), eta)
            moved.append(next_multiplier(self._multiplier, moved[0], state, rate))
        # A part without samples of its own stands in with another part's.
        slots = step.slots if step.share else step.slots[:0]
        slots, *moved = self.transport.replicas.gather_rows([slots, *(each[: len(slots)] for each in moved)])
        for table, values in zip((self._variables, self._multipliers), moved, strict=False):
            table.put(slots, values)
        self._clean = self._multiplier = None

    def to(self, device: torch.device) -> None:
        """Move the tables to a device, unless the settings give them a place of their own."""
        self._variables.to(device)
        self._multipliers.to(device)

    def state_dict(self) -> dict[str, Any]:
        """Return the tables and the state of the noise."""
        tables = {"variables": self._variables.state_dict(), "multipliers": self._multipliers.state_dict()}
        return {**super().state_dict(), **tables}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Go on from what `state_dict` has returned."""
        super().load_state_dict(state, device)
        self._variables.load_state_dict(state["variables"])
        self._multipliers.load_state_dict(state["multipliers"])
        self.to(device)
