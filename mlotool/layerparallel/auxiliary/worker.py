"""One stage at work: its passes, and its messages to its neighbours."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mlotool.core.bound_module import Slots
from mlotool.layerparallel.auxiliary.curvature import DECAY, EVERY, largest_curvature
from mlotool.layerparallel.auxiliary.equations import local_loss, variable_slope, violations
from mlotool.layerparallel.auxiliary.step import StageStep
from mlotool.layerparallel.auxiliary.timeline import Timeline
from mlotool.layerparallel.auxiliary.transport import AbstractTransport
from mlotool.layerparallel.auxiliary.variables import AbstractVariables
from mlotool.layerparallel.partition import Stage


class Worker:
    """Stage k at work. Its methods are the phases of a step; the workers of all stages go through them in one order.

    In one process the workers take each phase one after the other, the first stage first, but for `finish`, where the
    last one is first. No phase needs a message that another worker sends later in the same phase.

    Args:
        stage: the part of the module that it runs.
        variables: where the stage begins, and what its end is aimed at.
        transport: to and from the neighbours.
        timeline: records what takes how long.
        places: the places of the module's parameters and buffers.

    Attributes:
        violations: (2,), the violation at the interface before the stage in the last step, and the norm of the states
            there; None before the first step, and for the first stage.
        curvature: of the stage's loss in its variables, relative to the penalty's; 0 where no rate follows it.

    Example:
        >>> from mlotool.layerparallel import Auxiliary
        >>> from mlotool.layerparallel.auxiliary.transport import LocalTransport
        >>> from mlotool.layerparallel.auxiliary.stored_variables import StoredVariables
        >>> from mlotool.layerparallel.partition import partition
        >>> net = torch.nn.Linear(2, 1)
        >>> transport, settings = LocalTransport(), Auxiliary(stages=1).settings
        >>> variables = StoredVariables(0, 1, settings, transport, seed=0)
        >>> worker = Worker(partition(net, 1)[0], variables, transport, Timeline(0), Slots(net))
        >>> step = StageStep((torch.ones(4, 2),), 4, [], torch.float32, torch.device("cpu"), [10.0], "mean")
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
        places: Slots,
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
        self._aim: tuple[Tensor, Tensor | None] | None = None
        self._precision: tuple[str, torch.dtype, bool] | None = None
        self.curvature = 0.0

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
            self._aim = self.variables.target()
        self._precision = _autocast(found)
        self._loss = self._local_loss(step, found)
        return None

    def _local_loss(self, step: StageStep, state: Tensor) -> Tensor:
        assert self._aim is not None
        variable, multiplier = self._aim
        interface = self.number + 1
        return local_loss(state, variable, multiplier, step.beta(interface), step.weight(interface))

    def _gradient(self, step: StageStep, point: Tensor, loss_at: Callable[[Tensor], Tensor] | None) -> Tensor:
        """Return the derivative of the stage's loss with respect to where it begins, at another point than lambda_k."""
        leaf = point.detach().requires_grad_()
        with torch.enable_grad(), self._buffers(are_moved=False):
            if self.is_last:
                assert loss_at is not None
                loss = loss_at(leaf)
            else:
                assert self._precision is not None
                device, dtype, is_enabled = self._precision
                with torch.autocast(device, dtype=dtype, enabled=is_enabled):
                    found = self.stage(leaf, step.inputs)
                loss = self._local_loss(step, found.to(step.dtype))
        return torch.autograd.grad(loss, leaf, materialize_grads=True)[0]

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

    def correct(self, step: StageStep, loss_at: Callable[[Tensor], Tensor] | None = None) -> None:
        """Move lambda_k and kappa_k towards where the stage before has ended.

        Args:
            step: the one at hand.
            loss_at: the module's loss, where its last stage begins at another point; of the last stage.
        """
        if self.variables.is_first:
            return
        number, variable = self.number, self._leaf
        assert variable is not None and self._onward is not None
        with self._timeline.span(number, "communication"):
            state = self._transport.receive("state", number - 1, number)
        point, onward = variable.detach(), self._onward
        self.violations = violations(point, state)
        with self._timeline.span(number, "auxnet"):
            slope = self._slopes(step, state, point, onward, partial(self._gradient, step, loss_at=loss_at))
            self.variables.correct(step, state, slope.contiguous())
        self._leaf = self._onward = self.variables.own = self._aim = None

    def _slopes(
        self, step: StageStep, state: Tensor, point: Tensor, onward: Tensor, gradient: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return the sum of the slopes of lambda_k's steps, each times the rate."""
        number, settings, multiplier = self.number, self.variables.settings, self.variables.multiplier()
        beta, weight = step.beta(number), step.weight(number)
        rate, unit = settings.rate(number), self.variables.step_size(step, number)
        if rate is None:
            rate = self._safe_rate(step, point, onward, gradient)
        total = torch.zeros_like(point)
        for count in range(settings.lambda_steps):
            if count:
                onward = gradient(point)
            slope = rate / step.num_replicas * variable_slope(point, state, multiplier, beta, weight, onward)
            total, point = total + slope, point - unit * slope
        return total

    def _safe_rate(self, step: StageStep, point: Tensor, onward: Tensor, gradient: Callable[[Tensor], Tensor]) -> float:
        """Return `1 / (1 + curvature)`, half of the largest rate at which lambda_k's step is stable at that curvature.

        The penalty before the stage has the curvature 2 beta c; that of the stage's own loss is taken relative to it.
        With a penalty behind the stage it is the largest eigenvalue of J^T J, where J is the stage's Jacobian.
        """
        if step.number % EVERY == 0:
            bound = 2.0 * step.beta(self.number) * step.weight(self.number)
            # A part of the batch without samples of its own has no weight, and says nothing.
            found = float(largest_curvature(gradient, point, onward)) / bound if bound else 0.0
            [largest] = self._transport.replicas.largest([found])
            self.curvature = max(largest, DECAY * self.curvature)
        return 1.0 / (1.0 + self.curvature)

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


def _autocast(tensor: Tensor) -> tuple[str, torch.dtype, bool]:
    device = tensor.device.type
    return device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
