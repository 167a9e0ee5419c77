"""One stage at work: its passes, and its messages to its neighbours."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mlotool.core.slots import Places
from mlotool.layerparallel.auxiliary.equations import local_loss, variable_slope, violations
from mlotool.layerparallel.auxiliary.step import StageStep
from mlotool.layerparallel.auxiliary.timeline import Timeline
from mlotool.layerparallel.auxiliary.transport import AbstractTransport
from mlotool.layerparallel.auxiliary.variables import AbstractVariables
from mlotool.layerparallel.partition import Stage


class Worker:
    """Stage k at work. Its methods are the phases of a step; the workers of all stages go through them in one order.

    In one process the workers take each phase one after the other, the first stage first. No phase needs a message that
    another worker sends later in the same phase.

    Args:
        stage: the part of the module that it runs.
        variables: where the stage begins, and what its end is aimed at.
        transport: to and from the neighbours.
        timeline: records what takes how long.
        places: the places of the module's parameters and buffers.

    Attributes:
        violations: (2,), the violation at the interface before the stage in the last step, and the norm of the states
            there; None before the first step, and for the first stage.

    Example:
        >>> from mlotool.layerparallel import Auxiliary
        >>> from mlotool.layerparallel.auxiliary.transport import LocalTransport
        >>> from mlotool.layerparallel.auxiliary.stored_variables import StoredVariables
        >>> from mlotool.layerparallel.partition import partition
        >>> net = torch.nn.Linear(2, 1)
        >>> transport, settings = LocalTransport(), Auxiliary(stages=1).settings
        >>> variables = StoredVariables(0, 1, settings, transport, seed=0)
        >>> worker = Worker(partition(net, 1)[0], variables, transport, Timeline(0), Places(net))
        >>> step = StageStep((torch.ones(4, 2),), 4, [], torch.float32, torch.device("cpu"), 10.0, "mean")
        >>> worker.prepare(step)
        >>> loss = worker.forward(step).sum()
        >>> worker.backward(loss, [net.weight])
        [tensor([[4., 4.]])]
    """

    def __init__(
        self,
        stage: Stage,
        variables: AbstractVariables,
        transport: AbstractTransport,
        timeline: Timeline,
        places: Places,
    ) -> None:
        self.stage = stage
        self.variables = variables
        self.number = variables.number
        self.violations: Tensor | None = None
        self._transport = transport
        self._timeline = timeline
        self._places = places
        self._leaf: Tensor | None = None
        self._loss: Tensor | None = None
        self._onward: Tensor | None = None

    @property
    def is_last(self) -> bool:
        """Whether this is the last stage, whose loss is the module's."""
        return self.variables.is_last

    def pass_serially(self, step: StageStep) -> None:
        """Run the true state of the serial network through the stage.

        It gives samples that are seen for the first time their variables, and BatchNorm its running statistics.
        """
        number, state = self.number, None
        if not self.variables.is_first:
            self._transport.expect("serial", number - 1, number, step.blank(number))
            state = self._transport.receive("serial", number - 1, number)
            self.variables.start(step, state)
        if self.is_last and not step.buffers.in_serial_pass:
            return
        moves = step.buffers
        with torch.no_grad(), self._buffers(moves.in_serial_pass), self.stage.averaging(moves.num_collected):
            state = self.stage(state, step.inputs)
        if not self.is_last:
            self._transport.send("serial", number, number + 1, state.to(step.dtype).contiguous())

    def prepare(self, step: StageStep) -> None:
        """Find the auxiliary variables, and begin to receive where the stage before ends."""
        number = self.number
        with self._timeline.span(number, "communication"):
            self.variables.await_variable(step)
        with self._timeline.span(number, "auxnet"):
            self.variables.prepare(step)
        if not self.variables.is_first:
            self._transport.expect("state", number - 1, number, step.blank(number))

    def forward(self, step: StageStep) -> Any:
        """Run from lambda_k to the end of the stage; the last one returns what the module returns."""
        own = self.variables.own
        self._leaf = None if own is None else own.detach().requires_grad_()
        with self._timeline.span(self.number, "forward"), self._buffers(step.buffers.in_stages):
            found = self.stage(self._leaf, step.inputs)
        if self.is_last:
            return found
        found = found.to(step.dtype)
        self._transport.send("state", self.number, self.number + 1, found.detach().contiguous())
        with self._timeline.span(self.number, "communication"):
            variable, multiplier = self.variables.target()
        self._loss = local_loss(found, variable, multiplier, step.beta, step.weight(self.number + 1))
        return None

    def backward(self, loss: Tensor | None, theta: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the derivatives of the stage's loss with respect to theta, None where it does not depend on it.

        Args:
            loss: the module's, for the last stage.
            theta: parameters of the module; for a stage but the last, its own.
        """
        loss = loss if self.is_last else self._loss
        assert loss is not None
        with self._timeline.span(self.number, "backward"):
            points = [*theta] if self._leaf is None else [*theta, self._leaf]
            slopes = (
                torch.autograd.grad(loss, points, allow_unused=True) if loss.requires_grad else [None] * len(points)
            )
        self._loss = None
        if self._leaf is not None:
            self._onward = torch.zeros_like(self._leaf) if slopes[-1] is None else slopes[-1]
        return list(slopes[: len(theta)])

    def correct(self, step: StageStep) -> None:
        """Move lambda_k and kappa_k towards where the stage before has ended."""
        if self.variables.is_first:
            return
        number, variable = self.number, self._leaf
        assert variable is not None and self._onward is not None
        with self._timeline.span(number, "communication"):
            state = self._transport.receive("state", number - 1, number)
        with torch.no_grad():
            weight, variable = step.weight(number), variable.detach()
            multiplier = self.variables.multiplier()
            slope = variable_slope(variable, state, multiplier, step.beta, weight, self._onward) / step.num_replicas
            self.violations = violations(variable, state)
        with self._timeline.span(number, "auxnet"):
            self.variables.correct(step, state, slope.contiguous())
        self._leaf = self._onward = self.variables.own = None

    def finish(self, step: StageStep) -> None:
        """Do what can be done only after the next stage has corrected its variables."""
        with self._timeline.span(self.number, "communication"):
            self.variables.await_slope(step)
        with self._timeline.span(self.number, "auxnet"):
            self.variables.finish(step)

    @contextmanager
    def _buffers(self, are_moved: bool) -> Iterator[None]:
        """Let the stage's buffers move, or be copies that are thrown away."""
        if are_moved:
            yield
            return
        restore = self._places.fill({}, {name: buffer.clone() for name, buffer in self.stage.buffers().items()})
        try:
            yield
        finally:
            restore()
