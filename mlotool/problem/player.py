"""How losses see the module of a problem: as a function of tensors, or live in the problem's own training step."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from mlotool.core.bound_module import MOVING_BUFFERS, BoundModule, Slots
from mlotool.problem.shards import Shards


class Player(Protocol):
    """Gives a loss the module behind one of its roles: a problem's module, with the tensors to evaluate it at."""

    def pure(self, tensors: Sequence[Tensor] | None, training: bool | None) -> BoundModule:
        """Return the module as a function of `tensors`, one a parameter; None is its current ones, as constants."""

    def live(self, tensors: Sequence[Tensor] | None, training: bool | None) -> BoundModule:
        """Return the same for the problem's own training step, in which its buffers move."""


class WholePlayer:
    """The player of a module whose parameters are whole on each rank.

    Args:
        module: the problem's.
        parameters: those that are trained, in order.
        slots: theirs.
        call: what runs in the module's place; None is the module.
        step: what runs in its place in its own training steps; None is `call`.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: tuple[Tensor, ...],
        slots: Slots,
        call: Callable[..., Any] | None = None,
        step: Callable[..., Any] | None = None,
    ) -> None:
        self._parameters = parameters
        self._slots = slots
        self._call: Callable[..., Any] = call or module
        self._step: Callable[..., Any] = step or self._call

    def pure(self, tensors: Sequence[Tensor] | None, training: bool | None) -> BoundModule:
        """Return the module as a function of `tensors`."""
        if tensors is None:
            tensors = [tensor.detach() for tensor in self._parameters]
        return BoundModule.in_slots(self._slots, tensors, training, self._call)

    def live(self, tensors: Sequence[Tensor] | None, training: bool | None) -> BoundModule:
        """Return the module itself, or with other tensors in its parameters' places."""
        if tensors is None or tensors is self._parameters:
            return BoundModule.in_slots(self._slots, None, training, self._step)
        return BoundModule.in_slots(self._slots, tensors, training, self._call, MOVING_BUFFERS)


class ShardedPlayer:
    """The player of a module whose parameters are divided among ranks; to other problems they are constants.

    Args:
        shards: the module's.
        parameters: this rank's, in order.
    """

    def __init__(self, shards: Shards, parameters: tuple[Tensor, ...]) -> None:
        self._shards = shards
        self._parameters = parameters

    def pure(self, tensors: Sequence[Tensor] | None, training: bool | None) -> BoundModule:
        """Return a copy of the module at whole parameters; they have a gradient where `tensors` are this rank's own."""
        if tensors is self._parameters:
            return self._shards.own(training, updates_buffers=False)
        return self._shards.constant(training)

    def live(self, tensors: Sequence[Tensor] | None, training: bool | None) -> BoundModule:
        """Return the module itself."""
        return self._shards.own(training, updates_buffers=True)
