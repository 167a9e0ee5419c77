"""Whether the gradients of a round are taken as one program: compared with the members' plans, and measured."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Annotated, Any

import torch
from annotated_types import Ge, Lt
from torch import Tensor

from mlotool.fusion.round_members import RoundMembers, numbers
from mlotool.fusion.stack import NotFusedError, OwnValue
from mlotool.fusion.stacked_gradients import Drawings, FlatResult, RoundFunction, StackedGradients
from mlotool.program.agreement import ROUNDING, SAME, Kind, distances, sensitivity
from mlotool.program.guard import PythonState, why_unseen
from mlotool.program.trace import UntraceableError, copied, kinds_of
from mlotool.program.traced_rounds import Drawn

REPEATS = 3
"""Times that each way is measured; the shortest counts."""

RACES = 1e-2
"""Relative difference of two gradients by the same operations on a GPU, whose sums may have any order."""

DIFFERENT = (
    "problems.{problem}: found a gradient, as part of one program of several runs, that differs from that of this "
    "run's own plan by {difference:.1e} (relative) at tick {tick}; expected rounding. Its loss or a module depends on "
    "what is no tensor: gradients since tick {since} may be wrong, so the run ends. Keep it in a buffer, or write "
    "sweep.fuse=1."
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

UNTRUE = "the gradient of problems.{problem} as one program is {difference:.1e} (relative) off that of a run's own plan"


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
        for number in [number for number in numbers(live) if number not in {leader, *self._alike}]:
            moving = [self._members.moving(each) for each in (number, leader)]
            try:
                drawn = self._members.drawn(number, batches, with_steps=True)
                one, other = (self._at(number, drawn, by) for by in (number, leader))
            except UntraceableError as error:
                raise NotFusedError(str(error)) from error
            except Exception:
                # A member's own: its plan raises it as well.
                continue
            finally:
                for each in moving:
                    each.restore()
            for (problem, _), difference in _distances(one, other, {}, 0.0).items():
                if not difference <= limit:
                    raise NotFusedError(UNLIKE.format(problem=problem, difference=difference))
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
        moving = self._members.moving(leader)
        try:
            alone = partial(self._members.prepared, leader, batches)
            alone_s = sum(live) * _fastest(alone, moving.restore)[0]
        finally:
            moving.restore()
        differences = (self.difference(number, batches, fused) for number in numbers(live))
        reason = "one program of all takes longer" if fused_s > alone_s else ""
        if difference := next(filter(None, differences), None):
            reason = UNTRUE.format(problem=difference[0], difference=difference[1])
        at_once = self._gradients.at_once if self._gradients.at_once < len(live) else None
        return Verdict(not reason, fused_s, alone_s, reason, at_once)

    def difference(self, number: int, batches: Drawings, fused: FlatResult) -> Difference | None:
        """Return how a member's gradients or buffers differ from those of its plan but for rounding; nothing moves."""
        moving, unit = self._members.moving(number), fused.flat.unit
        if not fused.holds[number]:
            return None
        buffers = list(moving.buffers)
        before = self._by_problem(number, buffers)
        for position, value in zip(fused.flat.moved, fused.moved, strict=True):
            buffers[position] = value[number]
        rows = [parameter[number] for parameter in self._stack.tensors[: self._stack.num_parameters]]
        parameters = [row.clone() for row in rows]

        def planned(values: Sequence[Tensor]) -> Ends:
            for row, value in zip(rows, values, strict=True):
                row.copy_(value)
            moving.restore()
            steps = self._members.prepared(number, batches)
            ends = self._by_problem(number, [each.clone() for each in self._stack.buffers(number)])
            return ends | {(step.problem.name, _GRADIENT): step.gradient for step in steps}

        try:
            pairs = zip(self._members.names, fused.gradients, strict=True)
            ends = self._by_problem(number, buffers) | {(name, _GRADIENT): each.of(number) for name, each in pairs}
            differences = _distances(planned(parameters), ends, before, unit)
            least = {_GRADIENT: unit**SAME, _BUFFERS: ROUNDING * unit**SAME}
            apart = {kind: each for kind, each in differences.items() if not each <= least[kind[1]]}
            moves = sensitivity(lambda values: _tensors(planned(values)), parameters, before, unit) if apart else {}
            wrong = ((kind[0], each) for kind, each in apart.items() if not each <= ROUNDING * moves.get(kind, 0.0))
            return next(wrong, None)
        finally:
            for row, value in zip(rows, parameters, strict=True):
                row.copy_(value)
            moving.restore()

    def _by_problem(self, number: int, buffers: Sequence[Tensor]) -> dict[Kind, Any]:
        values, given = dict[Kind, Any](), iter(buffers)
        for problem in self._members.schedule(number).program.engine.problems:
            if problem.slots.has_buffers:
                values[problem.name, _BUFFERS] = [next(given) for _ in problem.slots.buffers()]
        return values

    def _at(self, number: int, drawn: Drawn, by: int) -> Ends:
        """Return the gradients at a member's tensors and batches, as another member computes them.

        Raises:
            UntraceableError: they cannot be taken as functions of tensors.
        """
        schedule = self._members.schedule(by)
        batches, tensors, seen = [*drawn.values()], list[Tensor](), dict[int, int]()
        for entry in chain(*batches):
            kinds_of(entry, tensors, seen)
        rows = [each[number] for each in self._stack.tensors] + [each.values[number] for each in self._values]
        together = [schedule.traced(name) for name in drawn]
        function = RoundFunction(together, schedule.program.engine, self._values, batches, by)
        with schedule.program.random:
            outputs = function(*rows, *[copied(each) for each in tensors])
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
