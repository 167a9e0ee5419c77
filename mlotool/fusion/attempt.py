"""Whether the gradients of a round are taken as one program: compared with the members' plans, and measured."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mlotool.fusion.comparison import UNLIKE, UNTRUE, Comparison, Difference, Moving, Verdict
from mlotool.fusion.round_members import Drawings, RoundMembers, numbers
from mlotool.fusion.stack import NotFusedError, OwnValue
from mlotool.fusion.stacked_gradients import Found, StackedGradients
from mlotool.program.agreement import ROUNDING, SAME, distances
from mlotool.program.guard import why_unseen
from mlotool.program.prepared_step import PreparedStep
from mlotool.program.python_places import PythonState
from mlotool.program.traced_function import UntraceableError

REPEATS = 3
"""Times that each way is measured; the shortest counts."""


class Attempt:
    """Looks at the gradients of a round, once as one program and once by the members' own plans.

    Args:
        members: of the round.
        gradients: takes them as one program.
        own: values in which members differ.
    """

    def __init__(self, members: RoundMembers, gradients: StackedGradients, own: Sequence[OwnValue]) -> None:
        self._members, self._gradients = members, gradients
        self._comparison = Comparison(members.names, members.schedules, members.stack, own)
        self._alike: set[int] = set()

    def check_pure(self, live: Sequence[bool], batches: Drawings) -> None:
        """Raise a NotFusedError if evaluating the losses of the first live member changes something in Python."""
        first = numbers(live)[0]
        if reason := why_unseen(self._members.schedule(first).program.engine.problems):
            raise NotFusedError(reason)
        moving, state = self._members.moving(first), PythonState(self._members.schedule(first).program.engine.problems)
        try:
            self._members.prepared(first, batches)
            if change := state.change():
                raise NotFusedError(change)
        finally:
            state.restore()
            moving.restore()

    def check_alike(self, live: Sequence[bool], batches: Drawings) -> None:
        """Raise a NotFusedError unless live members compute one function; those that were looked at are not again."""
        leader, *_ = there = numbers(live)
        for number in [each for each in there if each not in self._alike]:
            try:
                drawn = self._members.drawn(number, batches, with_steps=True)
                difference = None if number == leader else self._comparison.of_leader(number, leader, drawn)
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
            state = self._members.moving(number)
            try:
                seconds, prepared = _fastest(partial(self._members.prepared, number, batches), state.restore)
                alone_s += seconds
                difference = self._moved_otherwise(number, state, found)
                state.restore()
                difference = difference or self._difference(number, prepared, batches, found)
            finally:
                state.restore()
            if difference is not None and not reason:
                reason = UNTRUE.format(problem=difference[0], difference=difference[1])
        single = self._gradients.single(batches)
        if single is not None:
            # Alone they would run along a trace of their own.
            alone_s = sum(live) * _fastest(single, lambda: None)[0]
        is_fused = not reason and fused_s <= alone_s
        if not is_fused and not reason:
            reason = "one program of all takes longer"
        at_once = self._gradients.at_once if self._gradients.at_once < len(live) else None
        return Verdict(is_fused, fused_s, alone_s, reason, at_once)

    def difference(self, number: int, batches: Drawings, found: Found) -> Difference | None:
        """Return how a member's gradients differ from those of its own plan but for rounding; nothing moves."""
        state: Moving = self._members.moving(number)
        try:
            prepared = self._members.prepared(number, batches)
            difference = self._moved_otherwise(number, state, found)
            state.restore()
            return difference or self._difference(number, prepared, batches, found)
        finally:
            state.restore()

    def _moved_otherwise(self, number: int, before: Moving, found: Found) -> Difference | None:
        """Return a problem whose buffers a member's plan has moved otherwise than the program, and by how much."""
        if not before.buffers or (found.holds is not None and not found.holds[number]):
            return None
        places = [
            (problem.name, "buffers")
            for problem in self._members.schedule(number).program.engine.problems
            for _ in problem.slots.buffers()
        ]
        ends = list(before.buffers)
        for position, value in zip(found.flat.moved, found.moved, strict=True):
            ends[position] = value[number]

        def by_problem(tensors: Sequence[Tensor]) -> dict[tuple[str, str], list[Tensor]]:
            kinds: dict[tuple[str, str], list[Tensor]] = {}
            for place, tensor in zip(places, tensors, strict=True):
                kinds.setdefault(place, []).append(tensor)
            return kinds

        planned = self._members.stack.buffers(number)
        unit = found.flat.unit
        apart = distances(by_problem(planned), by_problem(ends), by_problem(before.buffers), unit)
        return next(((name, each) for (name, _), each in apart.items() if not each <= ROUNDING * unit**SAME), None)

    def _difference(
        self, number: int, steps: Sequence[PreparedStep], batches: Drawings, found: Found
    ) -> Difference | None:
        """Return a problem whose gradient is not that of the member's plan but for rounding, and by how much."""
        if found.holds is not None and not found.holds[number]:
            return None
        gradients = {name: each.of(number) for name, each in zip(self._members.names, found.gradients, strict=True)}
        again = partial(self._members.prepared, number, batches)
        return self._comparison.of_program(number, steps, gradients, found.flat.unit, again)


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
