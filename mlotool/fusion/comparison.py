"""Whether the members of a stack compute the same function, and whether their program computes it."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from mlotool.fusion.own_values import OwnValue
from mlotool.fusion.round_function import RoundFunction
from mlotool.fusion.stack import Stack
from mlotool.program import Schedule
from mlotool.program.agreement import NUM_MOVES, ROUNDING, SAME, moved
from mlotool.program.gradient_plan import Gradient
from mlotool.program.prepared_step import PreparedStep
from mlotool.program.traced_function import copied, kinds_of
from mlotool.program.traced_rounds import Drawn

Gradients = Mapping[str, Gradient]
"""By problem."""

Difference = tuple[str, float]
"""A problem, and how far apart its gradients are, relative to the first one."""

RACES = 1e-2
"""Relative difference of two gradients by the same operations on a GPU, whose sums may have any order."""


class Comparison:
    """Compares the gradients of a round's problems.

    Args:
        names: of the problems.
        schedules: those of the members; None has left.
        stack: their tensors.
        own: values in which members differ.
    """

    def __init__(
        self, names: Sequence[str], schedules: Sequence[Schedule | None], stack: Stack, own: Sequence[OwnValue]
    ) -> None:
        self._names, self._schedules, self._stack, self._own = names, schedules, stack, own

    def of_leader(self, number: int, leader: int, drawn: Drawn) -> Difference | None:
        """Return how a member's gradients differ from those that another one has at its tensors and batches.

        What they do not share is then no tensor: an attribute of a module, what an object that is a loss holds. Both
        are computed alike, so that any difference is one.

        Args:
            number: of the member.
            leader: of the other one, which is traced.
            drawn: its batches.

        Raises:
            UntraceableError: they cannot be taken as functions of tensors.
        """
        kept = [Moving(self._schedule(each), self._stack, each) for each in (number, leader)]
        try:
            expected, found = (self._at(number, drawn, by) for by in (number, leader))
        finally:
            for each in kept:
                each.restore()
        like = self._schedule(number).program.engine.problems[0].own[0]
        return next(self._apart(expected, found, RACES if like.is_cuda else torch.finfo(like.dtype).eps ** SAME), None)

    def of_program(
        self,
        number: int,
        steps: Sequence[PreparedStep],
        found: Gradients,
        unit: float,
        again: Callable[[], Sequence[PreparedStep]],
    ) -> Difference | None:
        """Return how the gradients that a program gives a member differ from those of its own plan, but for rounding.

        Args:
            number: of the member.
            steps: by its plan.
            found: by the program.
            unit: the relative error of one rounding.
            again: takes the steps' gradients anew, on the same batches and random numbers.
        """
        expected = {step.problem.name: step.gradient for step in steps}
        differences = dict(self._apart(expected, found, unit**SAME))
        moves = self._moved(number, unit, again)
        # Each move explains some; the first one most often all.
        while differences and (others := next(moves, None)) is not None:
            differences = {
                name: each
                for name, each in differences.items()
                if not each <= ROUNDING * _relative(expected[name], others[name])
            }
        moves.close()
        return next(iter(differences.items()), None)

    def _at(self, number: int, drawn: Drawn, by: int) -> Gradients:
        """Return the gradients at a member's tensors and batches, as another member computes them."""
        schedule = self._schedule(by)
        batches, tensors = [*drawn.values()], list[Tensor]()
        seen = dict[int, int]()
        for entries in batches:
            for entry in entries:
                kinds_of(entry, tensors, seen)
        rows = [each[number] for each in self._stack.tensors] + [each.values[number] for each in self._own]
        function = RoundFunction(
            [schedule.traced(name) for name in drawn], schedule.program.engine, self._own, batches, by
        )
        with schedule.program.random:
            outputs = iter(function(*rows, *[copied(each) for each in tensors]))
        found = {}
        for name, used, metrics in zip(drawn, function.used, function.names, strict=True):
            found[name] = [next(outputs) if is_used else None for is_used in used]
            for _ in ("loss", *metrics):
                next(outputs)
        return found

    def _apart(self, expected: Gradients, found: Gradients, limit: float) -> Iterator[Difference]:
        """Yield the problems whose gradients are further apart than so much, and by how much."""
        for name in self._names:
            if [each is None for each in expected[name]] != [each is None for each in found[name]]:
                yield name, float("inf")
                continue
            difference = _relative(expected[name], found[name])
            if not difference <= limit:
                yield name, difference

    def _moved(self, number: int, unit: float, again: Callable[[], Sequence[PreparedStep]]) -> Generator[Gradients]:
        """Yield gradients at parameters that are one rounding error away, in one direction after the other.

        They differ by more than one rounding error where large terms cancel, and by far more in finite differences.
        """
        rows = [each[number] for each in self._stack.tensors[: self._stack.num_parameters]]
        before = [row.clone() for row in rows]
        generator = torch.Generator().manual_seed(0)
        try:
            for _ in range(NUM_MOVES):
                for row, kept in zip(rows, before, strict=True):
                    row.copy_(moved(kept, unit, generator))
                yield {step.problem.name: step.gradient for step in again()}
        finally:
            for row, kept in zip(rows, before, strict=True):
                row.copy_(kept)

    def _schedule(self, number: int) -> Schedule:
        found = self._schedules[number]
        assert found is not None
        return found


class Moving:
    """What the plan of one member's gradient moves: its buffers, random numbers, and what its hypergradients keep.

    Args:
        schedule: the member's.
        stack: its tensors.
        number: of the member.

    Attributes:
        buffers: copies of its buffers.
    """

    def __init__(self, schedule: Schedule, stack: Stack, number: int) -> None:
        self._stack, self._number, self._random = stack, number, schedule.program.random
        self.buffers = [each.clone() for each in stack.buffers(number)]
        self._state = self._random.state_dict()
        self._memories = [(memory, memory.value) for memory in schedule.program.engine.memories]
        norms = [problem.trajectory.largest_norm for problem in schedule.program.engine.problems]
        self._norms = [(norm, norm.value) for norm in norms]

    def restore(self) -> None:
        """Put it back."""
        self._stack.put_buffers(self._number, self.buffers)
        self._random.load_state_dict(self._state)
        for memory, value in self._memories:
            memory.value = value
        for norm, value in self._norms:
            norm.value = value


def _relative(expected: Gradient, found: Gradient) -> float:
    """Return how far tensors are apart, over their norm; 0 where the first ones are not finite, as then neither is."""
    pairs = [(x.detach(), y.detach()) for x, y in zip(expected, found, strict=True) if x is not None and y is not None]
    distance = sum(float((x - y).double().square().sum()) for x, y in pairs)
    norm = sum(float(x.double().square().sum()) for x, _ in pairs)
    if not norm < float("inf"):
        return 0.0
    return (distance / norm) ** 0.5 if norm > 0 else (0.0 if distance == 0 else float("inf"))
