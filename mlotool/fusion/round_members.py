"""The members of a round, each of which can take its steps by its own plan."""

from collections.abc import Mapping, Sequence
from typing import Any

from mlotool.fusion.stack import Stack
from mlotool.fusion.stacked_gradients import Drawings
from mlotool.problem.optimizers.rule import Hyperparameters
from mlotool.problem.problem import Problem
from mlotool.program import Schedule
from mlotool.program.prepared_step import PreparedStep, StepResult
from mlotool.program.trace import TakenSteps
from mlotool.program.traced_rounds import Drawn

Outcome = dict[str, StepResult] | Exception | None
"""What the steps of one member have given, or the error of one; None of a member that takes no part."""

Positions = list[list[dict[str, int] | None]]
"""By member and problem of the round, where its stream stands; None where it has none."""


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
        holders: list[Any] = [*schedule.program.engine.memories]
        holders += [problem.trajectory.largest_norm for problem in schedule.program.engine.problems]
        self._values = [(holder, holder.value) for holder in holders]

    def restore(self) -> None:
        """Put it back."""
        self._stack.put_buffers(self._number, self.buffers)
        self._random.load_state_dict(self._state)
        for holder, value in self._values:
            holder.value = value


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
            [] if schedule is None else [schedule.program.problems[name] for name in names] for schedule in schedules
        ]
        first = next(schedule for schedule in schedules if schedule is not None).program
        self._recorded = [name for name in names if first.problems[name].trajectory.is_kept]

    def drop(self, number: int) -> None:
        """Forget a member that has left."""
        self.schedules[number], self.problems[number] = None, []

    def schedule(self, number: int) -> Schedule:
        """Return the schedule of a member that is there."""
        schedule = self.schedules[number]
        assert schedule is not None
        return schedule

    def moving(self, number: int) -> Moving:
        """Return what puts back what a member's plan moves."""
        return Moving(self.schedule(number), self.stack, number)

    def planned(self, live: Sequence[bool]) -> list[Outcome]:
        """Take the steps of live members by their plans, which draw their batches; return what each gives."""
        outcomes: list[Outcome] = [None] * len(live)
        for number in numbers(live):
            schedule = self.schedule(number)
            try:
                with schedule.program.random:
                    outcomes[number] = schedule.step_round(self.names)
                self.stack.changes += 1
                self.stack.refresh_member(number)
            except Exception as error:
                outcomes[number] = error
        return outcomes

    def prepared(self, number: int, batches: Drawings) -> list[PreparedStep]:
        """Return a member's steps on batches that were drawn, with their gradients; they are yet to be taken."""
        schedule = self.schedule(number)
        self.stack.changes += 1
        with schedule.program.random:
            return schedule.prepared_round(self.names, self.drawn(number, batches))

    def positions(self) -> Positions:
        """Return where the streams of all members stand."""
        return [
            [None if problem.stream is None else problem.stream.state_dict() for problem in problems]
            for problems in self.problems
        ]

    def go_back(self, positions: Positions, live: Sequence[bool]) -> None:
        """Let the streams of live members stand where they stood before they were drawn from."""
        for number in numbers(live):
            for problem, position in zip(self.problems[number], positions[number], strict=True):
                if problem.stream is not None and position is not None:
                    problem.stream.load_state_dict(position)

    def hyperparameters(self, number: int) -> list[tuple[Hyperparameters, ...] | None]:
        """Return by problem those of its optimizer, where other problems give some of them."""
        program = self.schedule(number).program
        return [
            program.hyperparameters(problem.name) if problem.settings.optimizer_roles else None
            for problem in self.problems[number]
        ]

    def drawn(self, number: int, batches: Drawings, *, with_steps: bool = False) -> Drawn:
        """Return the batches of one member; where asked for, with the recorded steps, which a plan finds by itself."""

        def own(entry: Mapping[str, Any]) -> dict[str, Any]:
            return {
                name: None if batch is None else batch.of(number)
                for name, batch in entry.items()
                if with_steps or batch is None or not isinstance(batch.value, TakenSteps)
            }

        return {name: [*map(own, entries)] for name, entries in zip(self.names, batches, strict=True)}

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


def add_outcome(outcomes: list[Outcome], number: int, outcome: Outcome) -> None:
    """Add what a member's steps have given to what those before have; an error takes their place."""
    before = outcomes[number]
    if isinstance(before, dict) and isinstance(outcome, dict):
        before.update(outcome)
    else:
        outcomes[number] = outcome
