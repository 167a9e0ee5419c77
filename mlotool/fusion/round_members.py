"""The members of a round, each of which can take its steps by its own plan."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlotool.fusion.stack import Stack
from mlotool.fusion.stacked_batches import StackedBatch
from mlotool.fusion.stacked_gradients import Drawings
from mlotool.problem.optimizers.rule import Hyperparameters
from mlotool.problem.problem import Problem
from mlotool.program import Schedule
from mlotool.program.prepared_step import PreparedStep, StepResult
from mlotool.program.traced_function import TakenSteps
from mlotool.program.traced_rounds import Drawn

Outcome = dict[str, StepResult] | Exception | None
"""What the steps of one member have given, or the error of one; None of a member that takes no part."""


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


class RoundMembers:
    """Takes the steps of a round of single members by their own plans.

    Args:
        names: of the problems that step together.
        schedules: those of the members; None has left.
        stack: their tensors.

    Attributes:
        schedules: the same.
        problems: by member those of the round, in their order.
    """

    def __init__(self, names: tuple[str, ...], schedules: Sequence[Schedule | None], stack: Stack) -> None:
        self.names, self.schedules, self.stack = names, list(schedules), stack
        self.problems: list[list[Problem]] = [
            [] if each is None else [each.program.problems[name] for name in names] for each in schedules
        ]
        first = next(each for each in schedules if each is not None).program
        self._recorded = [name for name in names if first.problems[name].trajectory.is_kept]

    def drop(self, number: int) -> None:
        """Forget a member that has left."""
        self.schedules[number], self.problems[number] = None, []

    def schedule(self, number: int) -> Schedule:
        """Return the schedule of a member that is there."""
        found = self.schedules[number]
        assert found is not None
        return found

    def moving(self, number: int) -> Moving:
        """Return what puts back what a member's plan moves."""
        return Moving(self.schedule(number), self.stack, number)

    def each(self, live: Sequence[bool], take: Callable[[int], dict[str, StepResult]]) -> list[Outcome]:
        """Return what each live member's steps give, or its own error."""
        outcomes: list[Outcome] = [None] * len(live)
        for number in numbers(live):
            try:
                with self.schedule(number).program.random:
                    outcomes[number] = take(number)
                self.stack.changes += 1
                self.stack.refresh_member(number)
            except Exception as error:
                outcomes[number] = error
        return outcomes

    def drawing(self, number: int) -> dict[str, StepResult]:
        """Take a member's steps; its batches are yet to be drawn."""
        return self.schedule(number).step_round(self.names)

    def planned(self, number: int, batches: Drawings, *, is_recorded: bool = True) -> dict[str, StepResult]:
        """Take a member's steps on batches that were drawn."""
        if not is_recorded:
            self.record(number, batches)
        return self.schedule(number).step_round(self.names, self.drawn(number, batches))

    def prepared(self, number: int, batches: Drawings) -> list[PreparedStep]:
        """Return a member's steps with their gradients; they are yet to be taken."""
        schedule = self.schedule(number)
        self.stack.changes += 1
        with schedule.program.random:
            return schedule.prepared_round(self.names, self.drawn(number, batches))

    def failures(self, live: Sequence[bool], batches: Drawings) -> dict[int, Exception]:
        """Return by member the error that its plan raises, such as of a target that is out of range; nothing moves."""
        found: dict[int, Exception] = {}
        for number in numbers(live):
            state = self.moving(number)
            try:
                self.prepared(number, batches)
            except Exception as error:
                found[number] = error
            finally:
                state.restore()
        return found

    def given(self, number: int) -> list[tuple[Hyperparameters, ...] | None]:
        """Return by problem the hyperparameters of its optimizer, where other problems give some of them."""
        program = self.schedule(number).program
        return [
            program.hyperparameters(each.name) if each.settings.optimizer_roles else None
            for each in self.problems[number]
        ]

    def drawn(self, number: int, batches: Drawings, *, with_steps: bool = False) -> Drawn:
        """Return the batches of one member, and the steps that are differentiated, which a plan finds by itself."""
        return {
            name: [
                {
                    key: _of_member(each, number)
                    for key, each in entry.items()
                    if with_steps or not (isinstance(each, StackedBatch) and isinstance(each.value, TakenSteps))
                }
                for entry in entries
            ]
            for name, entries in zip(self.names, batches, strict=True)
        }

    def record(self, number: int, batches: Drawings) -> None:
        """Record a member's steps where its hypergradients want to see them."""
        if not self._recorded:
            return
        program, drawn = self.schedule(number).program, self.drawn(number, batches)
        with program.random:
            for name in self._recorded:
                states = [program.recorder.state(name) for _ in drawn[name]]
                program.recorder.record(name, [entry[name] for entry in drawn[name]], states)


def numbers(live: Sequence[bool]) -> list[int]:
    """Return the numbers of the live members."""
    return [number for number, is_live in enumerate(live) if is_live]


def unread(batches: Drawings) -> dict[int, Exception]:
    """Return by member the error of a batch that cannot be read."""
    found: dict[int, Exception] = {}
    for batch in _apart(batches):
        for number, own in enumerate(batch):
            if isinstance(own, Exception):
                found.setdefault(number, own)
    return found


def are_apart(batches: Drawings) -> bool:
    """Say whether some batches could not be put together."""
    return bool(_apart(batches))


def _apart(batches: Drawings) -> list[list[Any]]:
    """Return the batches that are lists with one of each member."""
    values: list[Any] = [batch for entries in batches for entry in entries for batch in entry.values()]
    return [batch for batch in values if isinstance(batch, list)]


def _of_member(batch: Any, number: int) -> Any:
    if isinstance(batch, list):
        if isinstance(batch[number], Exception):
            raise batch[number]
        return batch[number]
    return None if batch is None else batch.of(number)


def add_outcome(outcomes: list[Outcome], number: int, found: Outcome) -> None:
    """Add what a member's steps have given to what those before have; an error takes their place."""
    before = outcomes[number]
    if isinstance(before, dict) and isinstance(found, dict):
        before.update(found)
    else:
        outcomes[number] = found


def with_errors(outcomes: Sequence[Outcome], errors: Mapping[int, Exception]) -> list[Outcome]:
    """Return outcomes with the errors of some members in their places."""
    return [errors.get(number, each) for number, each in enumerate(outcomes)]
