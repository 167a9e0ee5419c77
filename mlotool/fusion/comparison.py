"""Whether the gradients of a round are taken as one program: compared with the members' plans, and measured."""

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import torch
from annotated_types import Ge, Lt
from torch import Tensor

from mlotool.fusion.round_members import Moving, RoundMembers, numbers
from mlotool.fusion.stack import NotFusedError, OwnValue
from mlotool.fusion.stacked_gradients import Drawings, Found, RoundFunction, StackedGradients
from mlotool.program.agreement import NUM_MOVES, ROUNDING, SAME, distances, moved
from mlotool.program.gradient_plan import Gradient
from mlotool.program.guard import why_unseen
from mlotool.program.prepared_step import PreparedStep
from mlotool.program.python_places import PythonState
from mlotool.program.traced_function import UntraceableError, copied, kinds_of
from mlotool.program.traced_rounds import Drawn

REPEATS = 3
"""Times that each way is measured; the shortest counts."""

RACES = 1e-2
"""Relative difference of two gradients by the same operations on a GPU, whose sums may have any order."""

DIFFERENT = (
    "problems.{problem}: found a gradient, as part of one program of several runs, that differs from that of this "
    "run's own plan by {difference:.1e} (relative) at tick {tick}; expected rounding. Its loss or a module has changed "
    "by what is no tensor (a counter, a file, a clock), which a trace fixes: gradients since tick {since} may be "
    "wrong, so the run ends. Let the loss depend on tensors alone, such as a buffer that counts, or write sweep.fuse=1."
)

CHANGED_LATER = (
    "Gradients as one program of several runs were wrong for some of them, which have ended: {error} Those of the "
    "others are right at tick {tick}, and are taken one by one from there on; whether they were from tick {since} on "
    "is not known."
)

CHANGED = "what a gradient depends on has changed by what is no tensor (a counter, a file, a clock)"

CHANGED_PLACE = "{place} has changed, which a trace has fixed"

UNLIKE = (
    "the gradient of problems.{problem} is another function in other runs ({difference:.1e} apart, relative): what a "
    "loss or a module holds that is no tensor differs by run, or changes"
)

UNTRUE = (
    "the gradient of problems.{problem} as one program differs from that of a run's own plan by {difference:.1e} "
    "(relative)"
)


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
        found = self
        while found.before is not None and tick < found.since_tick:
            found = found.before
        return found

    def changed(self, tick: int, **changes: Any) -> "Verdict":
        """Return what holds from a tick on, in the place of what held then; what was decided for later ones is dropped.

        Args:
            tick: how many ticks have been taken.
            changes: the fields that are others.
        """
        held = self.at(tick)
        return replace(held, **changes, since_tick=tick, before=held)


Gradients = Mapping[str, Gradient]
"""By problem."""

Difference = tuple[str, float]
"""A problem, and how far apart its gradients are, relative to the first one."""


class Comparison:
    """Compares the gradients of a round as one program with those by the members' own plans.

    Args:
        members: of the round.
        gradients: takes them as one program.
        own: values in which members differ.
    """

    def __init__(self, members: RoundMembers, gradients: StackedGradients, own: Sequence[OwnValue]) -> None:
        self._members, self._gradients, self._own = members, gradients, own
        self._stack, self._alike = members.stack, set[int]()

    def check_pure(self, live: Sequence[bool], batches: Drawings) -> None:
        """Raise a NotFusedError if evaluating the losses of the first live member changes something in Python."""
        first = live.index(True)
        problems = self._members.schedule(first).program.engine.problems
        if reason := why_unseen(problems):
            raise NotFusedError(reason)
        moving, state = self._members.moving(first), PythonState(problems)
        try:
            self._members.prepared(first, batches)
            if change := state.change():
                raise NotFusedError(change)
        finally:
            state.restore()
            moving.restore()

    def check_alike(self, live: Sequence[bool], batches: Drawings) -> None:
        """Raise a NotFusedError unless live members compute one function; those that were looked at are not again.

        What they do not share is then no tensor: an attribute of a module, what an object that is a loss holds. Both
        are computed alike, so that any difference is one.
        """
        leader = live.index(True)
        like = self._members.schedule(leader).program.engine.problems[0].own[0]
        limit = RACES if like.is_cuda else torch.finfo(like.dtype).eps ** SAME
        for number in [number for number in numbers(live) if number not in self._alike]:
            difference: Difference | None = None
            try:
                drawn = self._members.drawn(number, batches, with_steps=True)
                if number != leader:
                    moving = [self._members.moving(each) for each in (number, leader)]
                    try:
                        expected, found = (self._at(number, drawn, by) for by in (number, leader))
                    finally:
                        for each in moving:
                            each.restore()
                    difference = next(self._apart(expected, found, limit), None)
            except UntraceableError as error:
                raise NotFusedError(str(error)) from error
            except Exception:
                # A member's own: its plan raises it as well.
                continue
            if difference is not None:
                raise NotFusedError(UNLIKE.format(problem=difference[0], difference=difference[1]))
            self._alike.add(number)

    def __call__(self, live: Sequence[bool], batches: Drawings, found: Found) -> Verdict:
        """Take the gradients in both ways, and decide; nothing moves.

        Args:
            live: which members take part; the plans of all of them work.
            batches: theirs.
            found: their gradients as one program.
        """
        fused_s, _ = _fastest(lambda: self._gradients(live, batches), lambda: None)
        alone_s, reason = 0.0, ""
        for number in numbers(live):
            moving = self._members.moving(number)
            try:
                seconds, prepared = _fastest(partial(self._members.prepared, number, batches), moving.restore)
                alone_s += seconds
                difference = self._compared(number, moving, prepared, batches, found)
            finally:
                moving.restore()
            if difference is not None and not reason:
                reason = UNTRUE.format(problem=difference[0], difference=difference[1])
        if (single := self._gradients.single(batches)) is not None:
            # Alone they would run along a trace of their own.
            alone_s = sum(live) * _fastest(single, lambda: None)[0]
        if not reason and fused_s > alone_s:
            reason = "one program of all takes longer"
        at_once = self._gradients.at_once if self._gradients.at_once < len(live) else None
        return Verdict(not reason, fused_s, alone_s, reason, at_once)

    def difference(self, number: int, batches: Drawings, found: Found) -> Difference | None:
        """Return how a member's gradients differ from those of its own plan but for rounding; nothing moves."""
        moving = self._members.moving(number)
        try:
            return self._compared(number, moving, self._members.prepared(number, batches), batches, found)
        finally:
            moving.restore()

    def _compared(
        self, number: int, moving: Moving, steps: Sequence[PreparedStep], batches: Drawings, found: Found
    ) -> Difference | None:
        """Return a problem whose buffers or gradient are not those of a member's plan, and by how much.

        Args:
            number: of the member.
            moving: its state before the steps, in which it is left.
            steps: by its plan, which has moved its buffers.
            batches: of all members.
            found: by the program.
        """
        difference = self._moved_otherwise(number, moving, found) if found.counts(number) else None
        moving.restore()
        if difference is not None or not found.counts(number):
            return difference
        expected, unit = {step.problem.name: step.gradient for step in steps}, found.flat.unit
        gradients = {name: each.of(number) for name, each in zip(self._members.names, found.gradients, strict=True)}
        differences = dict(self._apart(expected, gradients, unit**SAME))
        moves = self._moves(number, unit, batches)
        # Each move explains some; the first one most often all.
        while differences and (others := next(moves, None)) is not None:
            differences = {
                name: each
                for name, each in differences.items()
                if not each <= ROUNDING * _relative(expected[name], others[name])
            }
        moves.close()
        return next(iter(differences.items()), None)

    def _moved_otherwise(self, number: int, before: Moving, found: Found) -> Difference | None:
        """Return a problem whose buffers a member's plan has moved otherwise than the program, and by how much."""
        if not before.buffers:
            return None
        problems = self._members.schedule(number).program.engine.problems
        names = [problem.name for problem in problems for _ in problem.slots.buffers()]
        ends, unit = list(before.buffers), found.flat.unit
        for position, value in zip(found.flat.moved, found.moved, strict=True):
            ends[position] = value[number]

        def by_problem(tensors: Sequence[Tensor]) -> dict[tuple[str, str], list[Tensor]]:
            kinds: dict[tuple[str, str], list[Tensor]] = {}
            for name, tensor in zip(names, tensors, strict=True):
                kinds.setdefault((name, "buffers"), []).append(tensor)
            return kinds

        planned = by_problem(self._stack.buffers(number))
        apart = distances(planned, by_problem(ends), by_problem(before.buffers), unit)
        return next(((name, each) for (name, _), each in apart.items() if not each <= ROUNDING * unit**SAME), None)

    def _at(self, number: int, drawn: Drawn, by: int) -> Gradients:
        """Return the gradients at a member's tensors and batches, as another member computes them.

        Raises:
            UntraceableError: they cannot be taken as functions of tensors.
        """
        schedule = self._members.schedule(by)
        batches, tensors, seen = [*drawn.values()], list[Tensor](), dict[int, int]()
        for entries in batches:
            for entry in entries:
                kinds_of(entry, tensors, seen)
        rows = [each[number] for each in self._stack.tensors] + [each.values[number] for each in self._own]
        together = [schedule.traced(name) for name in drawn]
        function = RoundFunction(together, schedule.program.engine, self._own, batches, by)
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
        for name in self._members.names:
            if [each is None for each in expected[name]] != [each is None for each in found[name]]:
                yield name, float("inf")
            elif not (difference := _relative(expected[name], found[name])) <= limit:
                yield name, difference

    def _moves(self, number: int, unit: float, batches: Drawings) -> Generator[Gradients]:
        """Yield a member's gradients at parameters that are one rounding error away, in one direction after the other.

        They differ by more than one rounding error where large terms cancel, and by far more in finite differences.
        """
        rows = [each[number] for each in self._stack.tensors[: self._stack.num_parameters]]
        before = [row.clone() for row in rows]
        generator = torch.Generator().manual_seed(0)
        try:
            for _ in range(NUM_MOVES):
                for row, kept in zip(rows, before, strict=True):
                    row.copy_(moved(kept, unit, generator))
                yield {step.problem.name: step.gradient for step in self._members.prepared(number, batches)}
        finally:
            for row, kept in zip(rows, before, strict=True):
                row.copy_(kept)


def _relative(expected: Gradient, found: Gradient) -> float:
    """Return how far tensors are apart, over their norm; 0 where the first ones are not finite, as then neither is."""
    pairs = [(x.detach(), y.detach()) for x, y in zip(expected, found, strict=True) if x is not None and y is not None]
    distance = sum(float((x - y).double().square().sum()) for x, y in pairs)
    norm = sum(float(x.double().square().sum()) for x, _ in pairs)
    if not norm < float("inf"):
        return 0.0
    return (distance / norm) ** 0.5 if norm > 0 else (0.0 if distance == 0 else float("inf"))


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
