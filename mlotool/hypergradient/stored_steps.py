"""Going back over the recorded steps of an unroll, of which some have no parameters: those are taken again."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor

from mlotool.hypergradient.step_products import RecordedStep
from mlotool.problem.interface import LowerView, Unroll, Vector
from mlotool.problem.optimizers.rule import State
from mlotool.problem.step_store import AbstractStepStore, middle
from mlotool.problem.trajectory import StepRecord

Point = tuple[Vector, Sequence[State]]
"""Parameters and optimizer state before a step."""


class StoredSteps:
    """The recorded steps of an unroll, each whole when it is asked for.

    Args:
        store: says how many checkpoints may be held.
        unroll: of the problem, with its records.
        view: likewise.
        inputs: what shapes it.

    Example:
        >>> from mlotool.problem.interface import LowerProblem
        >>> from mlotool.problem.step_store import KeepAll
        >>> record = StepRecord((torch.ones(2),), ({},), (), (), {})
        >>> unroll = Unroll((record,), True, (), None, *[None] * 5)
        >>> steps = StoredSteps(KeepAll(), unroll, LowerView(LowerProblem("w"), (), None), [])
        >>> [each.theta for each in steps.backwards(0)]
        [(tensor([1., 1.]),)]
    """

    def __init__(self, store: AbstractStepStore, unroll: Unroll, view: LowerView, inputs: Vector) -> None:
        self._store = store
        self._unroll = unroll
        self._view = view
        self._inputs = [each.detach() for each in inputs]
        self._records = unroll.records

    def backwards(self, first: int) -> Iterator[StepRecord]:
        """Yield the steps from the last one to the `first`."""
        kept = [number for number, record in enumerate(self._records) if record.is_checkpoint]
        end = len(self._records)
        for count in range(len(kept), 0, -1):
            begin = kept[count - 1]
            free = self._store.num_free(end - begin, count)
            yield from self._between(begin, end, self._kept(begin), free, first)
            end = begin
            if begin <= first:
                return

    def at(self, number: int) -> StepRecord:
        """Return one step."""
        begin = max(each for each in range(number + 1) if self._records[each].is_checkpoint)
        return self._whole(number, self._forward(begin, number, self._kept(begin)))

    def last(self) -> tuple[LowerView, AbstractContextManager[None]]:
        """Return the problem as the last step saw it, on one of its batches, with what that depends on as it was."""
        record = self.at(len(self._records) - 1)
        # A loss that is another function each time would be told of its tangents.
        self._step(record).compare()
        batch, as_then = next(record.evaluations(self._view.problem.module))
        own_loss = self._unroll.own_loss

        def loss(theta: Vector, inputs: Vector) -> Tensor:
            return own_loss(theta, inputs, batch, record.lower_snapshots)

        return replace(self._view, theta=record.theta, own_loss=loss), as_then

    def _between(self, begin: int, end: int, point: Point, free: int, first: int) -> Iterator[StepRecord]:
        """Yield the steps of a part from its last one, with `free` checkpoints beside that at its beginning."""
        while end - begin > 1 and end - 1 > first:
            if free == 0:
                end -= 1
                yield self._whole(end, self._forward(begin, end, point))
                continue
            split = begin + middle(end - begin, free)
            yield from self._between(split, end, self._forward(begin, split, point), free - 1, first)
            end = split
        if begin >= first:
            yield self._whole(begin, point)
        elif end - 1 >= first:
            yield self._whole(end - 1, self._forward(begin, end - 1, point))

    def _forward(self, begin: int, end: int, point: Point) -> Point:
        """Return parameters and state after the steps from `begin` up to `end`, which are taken again."""
        for number in range(begin, end):
            record = self._whole(number, point)
            gradient = self._step(record).gradient()
            assert self._unroll.replay is not None
            with torch.no_grad():
                point = self._unroll.replay(record.theta, gradient, record.state, record.hyperparameters, self._inputs)
        return point

    def _step(self, record: StepRecord) -> RecordedStep:
        return RecordedStep(self._unroll, self._view, record, self._inputs, [False] * len(self._inputs))

    def _kept(self, number: int) -> Point:
        record = self._on_device(self._records[number])
        return record.theta, record.state

    def _whole(self, number: int, point: Point) -> StepRecord:
        return replace(self._on_device(self._records[number]), theta=tuple(point[0]), state=tuple(point[1]))

    def _on_device(self, record: StepRecord) -> StepRecord:
        return record.on(self._view.theta[0].device) if self._store.offload else record
