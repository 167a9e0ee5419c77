"""The members of a round, each of which can take its steps by its own plan, and what the plans say of one program."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Annotated, Any

import torch
from annotated_types import Ge, Lt
from torch import Tensor

from mlotool.fusion.stack import NotFusedError, OwnValue, Stack
from mlotool.fusion.stacked_batches import TakenSteps
from mlotool.fusion.stacked_gradients import Drawings, FlatResult, RoundFunction, StackedGradients
from mlotool.problem.problem import Problem
from mlotool.program import Schedule
from mlotool.program.agreement import ROUNDING, SAME, Kind, distances, sensitivity
from mlotool.program.gradient_plan import PreparedStep, StepResult
from mlotool.program.guard import PythonState, why_unseen
from mlotool.program.trace import Drawn, UntraceableError, copied, kinds_of

Outcome = dict[str, StepResult] | Exception | None
"""What the steps of one member have given, or the error of one; None of a member that takes no part."""

Positions = list[list[dict[str, int] | None]]
"""By member and problem of the round, where its stream stands; None where it has none."""


class RoundMembers:
    """Takes the steps of a round of single members by their own plans.

    Args:
        names: of the problems that step together.
        schedules: those of the members; None has left.
        stack: their tensors.

    Attributes:
        problems: by member those of the round, in their order.
    """

    def __init__(self, names: tuple[str, ...], schedules: Sequence[Schedule | None], stack: Stack) -> None:
        self.names, self.schedules, self.stack = names, list(schedules), stack
        self.problems: list[list[Problem]] = [
            [] if schedule is None else [schedule.program.problems[name] for name in names] for schedule in schedules
        ]
        first = next(filter(None, schedules)).program
        self._recorded = [name for name in names if first.problems[name].trajectory.is_kept]

    def drop(self, number: int) -> None:
        """Forget a member that has left."""
        self.schedules[number], self.problems[number] = None, []

    def schedule(self, number: int) -> Schedule:
        """Return the schedule of a member that is there."""
        schedule = self.schedules[number]
        assert schedule is not None
        return schedule

    @contextmanager
    def unmoved(self, number: int) -> Iterator[Callable[[], None]]:
        """Put back what the plan of a member's gradient moves: buffers, random numbers, what hypergradients keep.

        Yields:
            What does so at once.
        """
        program = self.schedule(number).program
        buffers = [buffer.clone() for buffer in self.stack.buffers(number)]
        state, places = program.random.state_dict(), list[tuple[Any, str]]()
        places += [(memory, "value") for memory in program.engine.memories]
        places += [(problem.trajectory, "largest_norm") for problem in program.engine.problems]
        values = [getattr(holder, name) for holder, name in places]

        def restore() -> None:
            self.stack.put_buffers(number, buffers)
            program.random.load_state_dict(state)
            for (holder, name), value in zip(places, values, strict=True):
                setattr(holder, name, value)

        try:
            yield restore
        finally:
            restore()

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

    def drawn(self, number: int, batches: Drawings, *, with_steps: bool = False) -> Drawn:
        """Return the batches of one member; where asked for, with the recorded steps, which a plan finds by itself."""

        def of_member(entry: Mapping[str, Any]) -> dict[str, Any]:
            return {
                name: None if batch is None else batch.of(number)
                for name, batch in entry.items()
                if with_steps or batch is None or not isinstance(batch.value, TakenSteps)
            }

        return {name: [*map(of_member, entries)] for name, entries in zip(self.names, batches, strict=True)}

    def record(self, number: int, batches: Drawings) -> None:
        """Record a member's steps where its hypergradients want to see them."""
        program, drawn = self.schedule(number).program, self.drawn(number, batches) if self._recorded else {}
        for name in self._recorded:
            with program.random:
                states = [program.recorder.state(name) for _ in drawn[name]]
                program.recorder.record(name, [entry[name] for entry in drawn[name]], states)


def numbers(live: Sequence[bool]) -> list[int]:
    """Return the numbers of the live members."""
    return [number for number, is_live in enumerate(live) if is_live]


REPEATS = 3
"""Times that each way is measured; the shortest counts."""

RACES = 1e-2
"""Relative difference of two gradients by the same operations on a GPU, whose sums may have any order."""

Tick = Annotated[int, Ge(0), Lt(2**53)]
Seconds = Annotated[float, Ge(0), Lt(float("inf"))]


@dataclass(frozen=True)
class Verdict:
    """Whether the gradients of a round are taken as one program.

    Args:
        is_fused: whether they are.
        fused_s: seconds of a round of all members, their gradients as one program; None where that was not measured.
        alone_s: seconds of it with their gradients one by one.
        reason: why they are taken one by one; "" where they are not.
        at_once: how many members' gradients one program takes, where those of all did not fit into memory.
        since_tick: how many ticks had been taken when it was decided.
        before: what held until then; None where nothing was known.
    """

    is_fused: bool
    fused_s: Seconds | None = None
    alone_s: Seconds | None = None
    reason: str = ""
    at_once: Annotated[int, Ge(1), Lt(2**53)] | None = None
    since_tick: Tick = 0
    before: "Verdict | None" = None

    def at(self, tick: int) -> "Verdict":
        """Return what holds after so many ticks: runs that go on from an older checkpoint take those anew."""
        verdict = self
        while verdict.before is not None and tick < verdict.since_tick:
            verdict = verdict.before
        return verdict

    def changed(self, tick: int, **changes: Any) -> "Verdict":
        """Return what holds from a tick on, in the place of what held then; what was decided for later ones is dropped.

        Args:
            tick: how many ticks have been taken.
            changes: the fields that are others.
        """
        held = self.at(tick)
        return replace(held, **changes, since_tick=tick, before=held)


Ends = Mapping[Kind, Sequence[Tensor | None]]
"""By problem its gradient, None for a parameter that has none, and its buffers."""

Difference = tuple[str, float]
"""A problem, and how far apart its gradients or buffers are, relative to the first ones."""

_GRADIENT, _BUFFERS = "gradient", "buffers"


class Comparison:
    """Compares the gradients of a round as one program with those by the members' own plans.

    Args:
        members: of the round.
        gradients: takes them as one program.
        values: those in which members differ.
    """

    def __init__(self, members: RoundMembers, gradients: StackedGradients, values: Sequence[OwnValue]) -> None:
        self._members, self._gradients, self._values = members, gradients, values
        self._stack, self._alike = members.stack, set[int]()

    def check_pure(self, live: Sequence[bool], batches: Drawings) -> None:
        """Raise a NotFusedError if evaluating the losses of the first live member changes something in Python."""
        first = live.index(True)
        problems = self._members.schedule(first).program.engine.problems
        if reason := why_unseen(problems):
            raise NotFusedError(reason)
        state = PythonState(problems)
        try:
            with self._members.unmoved(first):
                self._members.prepared(first, batches)
                if change := state.change():
                    raise NotFusedError(change)
        finally:
            state.restore()

    def check_alike(self, live: Sequence[bool], batches: Drawings) -> None:
        """Raise a NotFusedError unless live members compute one function; those that were looked at are not again.

        What they do not share is then no tensor: an attribute of a module, what an object that is a loss holds. Both
        are computed alike, so that any difference is one.
        """
        leader = live.index(True)
        like = self._stack.tensors[0]
        limit = RACES if like.is_cuda else torch.finfo(like.dtype).eps ** SAME
        for number in [number for number in numbers(live) if number not in {leader, *self._alike}]:
            with ExitStack() as unmoved:
                for member in (number, leader):
                    unmoved.enter_context(self._members.unmoved(member))
                try:
                    drawn = self._members.drawn(number, batches, with_steps=True)
                    ends, others = (self._ends_at(number, drawn, by) for by in (number, leader))
                except UntraceableError as error:
                    raise NotFusedError(str(error)) from error
                except Exception:
                    # A member's own: its plan raises it as well.
                    continue
            for (problem, _), difference in _distances(ends, others, {}, 0.0).items():
                if not difference <= limit:
                    raise NotFusedError(
                        f"the gradient of problems.{problem} is another function in other runs ({difference:.1e} "
                        "apart, relative): what a loss or a module holds that is no tensor differs by run, or changes"
                    )
            self._alike.add(number)

    def __call__(self, live: Sequence[bool], batches: Drawings, fused: FlatResult) -> Verdict:
        """Take the gradients in both ways, and decide; nothing moves.

        Args:
            live: which members take part; the plans of all of them work.
            batches: theirs.
            fused: their gradients as one program.
        """
        fused_s, _ = _fastest(lambda: self._gradients(live, batches), lambda: None)
        leader = live.index(True)
        with self._members.unmoved(leader) as restore:
            alone_s = sum(live) * _fastest(lambda: self._members.prepared(leader, batches), restore)[0]
        differences = (self.difference(number, batches, fused) for number in numbers(live))
        reason = "one program of all takes longer" if fused_s > alone_s else ""
        for problem, difference in filter(None, differences):
            reason = (
                f"the gradient of problems.{problem} as one program is {difference:.1e} (relative) off that of a run's "
                "own plan"
            )
            break
        at_once = self._gradients.at_once if self._gradients.at_once < len(live) else None
        return Verdict(not reason, fused_s, alone_s, reason, at_once)

    def difference(self, number: int, batches: Drawings, fused: FlatResult) -> Difference | None:
        """Return how a member's gradients or buffers differ from those of its plan but for rounding; nothing moves."""
        if not fused.holds[number]:
            return None
        rows = [parameter[number] for parameter in self._stack.tensors[: self._stack.num_parameters]]
        parameters, buffers = ([tensor.clone() for tensor in x] for x in (rows, self._stack.buffers(number)))
        before, unit = self._by_problem(number, buffers), fused.flat.unit
        for position, value in zip(fused.flat.moved, fused.moved, strict=True):
            buffers[position] = value[number]
        gradients = zip(self._members.names, fused.gradients, strict=True)
        ends = self._by_problem(number, buffers) | {(name, _GRADIENT): each.of(number) for name, each in gradients}
        with self._members.unmoved(number) as restore:

            def planned(values: Sequence[Tensor]) -> Ends:
                torch._foreach_copy_(rows, [*values])
                restore()
                steps = self._members.prepared(number, batches)
                buffers_now = [buffer.clone() for buffer in self._stack.buffers(number)]
                return self._by_problem(number, buffers_now) | {
                    (step.problem.name, _GRADIENT): step.gradient for step in steps
                }

            try:
                apart = _distances(planned(parameters), ends, before, unit)
                wrong = {kind: distance for kind, distance in apart.items() if not distance <= unit**SAME}
                if wrong:
                    moves = sensitivity(lambda values: _tensors(planned(values)), parameters, before, unit)
                    wrong = {kind: x for kind, x in wrong.items() if not x <= ROUNDING * moves.get(kind, 0.0)}
            finally:
                torch._foreach_copy_(rows, parameters)
        return next(((problem, distance) for (problem, _), distance in wrong.items()), None)

    def _by_problem(self, number: int, buffers: Sequence[Tensor]) -> dict[Kind, Any]:
        values, rest = dict[Kind, Any](), iter(buffers)
        for problem in self._members.schedule(number).program.engine.problems:
            if problem.slots.has_buffers:
                values[problem.name, _BUFFERS] = [next(rest) for _ in problem.slots.buffers()]
        return values

    def _ends_at(self, number: int, drawn: Drawn, by: int) -> Ends:
        """Return the gradients at a member's tensors and batches, as another member computes them.

        Raises:
            UntraceableError: they cannot be taken as functions of tensors.
        """
        schedule = self._members.schedule(by)
        batches, tensors, seen = [*drawn.values()], list[Tensor](), dict[int, int]()
        for entry in chain(*batches):
            kinds_of(entry, tensors, seen)
        rows = [tensor[number] for tensor in (*self._stack.tensors, *[value.values for value in self._values])]
        together = [schedule.traced(name) for name in drawn]
        function = RoundFunction(together, schedule.program.engine, self._values, batches, by)
        with schedule.program.random:
            outputs = function(*rows, *map(copied, tensors))
        return {(name, _GRADIENT): each.gradient for name, each in zip(drawn, function.parts(outputs)[0], strict=True)}


def _distances(expected: Ends, found: Ends, before: Ends, unit: float) -> dict[Kind, float]:
    """Return how far ends are apart, as `distances` does; infinite where other parameters have a gradient.

    A gradient that is not finite is no difference: the other one is not, either.
    """
    other_use = [kind for kind in expected if [x is None for x in expected[kind]] != [x is None for x in found[kind]]]
    kept = {
        kind: values
        for kind, values in _tensors(expected).items()
        if kind not in other_use and (kind[1] == _BUFFERS or all(value.isfinite().all() for value in values))
    }
    return distances(kept, _tensors(found), _tensors(before), unit) | dict.fromkeys(other_use, float("inf"))


def _tensors(ends: Ends) -> dict[Kind, list[Tensor]]:
    return {kind: [value.detach() for value in values if value is not None] for kind, values in ends.items()}


def _fastest(take: Callable[[], Any], before: Callable[[], None]) -> tuple[float, Any]:
    """Return the seconds of the fastest of several times, and what the last one has given."""
    best = float("inf")
    for _ in range(REPEATS):
        before()
        began = _now()
        result = take()
        best = min(best, _now() - began)
    return best, result


def _now() -> float:
    """Return the time in seconds: that of this process where it computes in one thread, so that others do not count."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    elif torch.get_num_threads() == 1:
        return time.process_time()
    return time.perf_counter()
