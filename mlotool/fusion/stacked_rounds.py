"""A round of steps of all members: their gradients by one program, held to the members' own plans, or one by one."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from mlotool.core.errors import RunError
from mlotool.core.user_code import is_of_user
from mlotool.fusion.errors import NotFusedError
from mlotool.fusion.feed import JointStream
from mlotool.fusion.joint_draw import JointDraw
from mlotool.fusion.joint_steps import step_together
from mlotool.fusion.own_values import OwnValue
from mlotool.fusion.stack import Stack
from mlotool.fusion.stacked_gradients import Found, JointBatches, StackedGradients
from mlotool.program import Schedule
from mlotool.program.schedule import PreparedStep
from mlotool.program.step_result import StepResult
from mlotool.program.traced_rounds import Drawn
from mlotool.program.untraceable import why_untraceable

Outcome = dict[str, StepResult] | Exception | None
"""What the steps of one member have given, or the error of one; None of a member that takes no part."""

REPEATS = 3
"""Times that each way is measured; the shortest counts."""

_DIFFERENT = (
    "problems.{problem}: the gradient of run {number} of a group of fused runs differs from that of its own plan by "
    "{difference:.1e} (relative); expected rounding. What a loss or a module keeps in Python (a counter, a rate that "
    "changes) is fixed by a trace. Keep it in a buffer, or write sweep.fuse=1."
)


@dataclass(frozen=True)
class Verdict:
    """Whether the gradients of a round are taken as one program.

    Args:
        is_fused: whether they are.
        fused_s: seconds of the gradients of all members as one program; None where that was not measured.
        alone_s: seconds of them one by one.
        reason: why they are taken one by one; "" where they are not.
        at_once: how many members' gradients one program takes, where those of all did not fit into memory.
    """

    is_fused: bool
    fused_s: float | None = None
    alone_s: float | None = None
    reason: str = ""
    at_once: int | None = None


class StackedRound:
    """Takes a round of steps of all members of a stack.

    The first time, each member's gradient is also taken by its own plan, which shows whether the members are what they
    seem to be, and which way is the faster one. The tenth time, the hundredth and so on one member is looked at again.

    Args:
        names: of the problems that step together.
        schedules: those of the members; None has left.
        stack: their tensors.
        own: values in which members differ.
        streams: by name of the problem.
        verdict: what was found out before, where a sweep is gone on with.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        schedules: Sequence[Schedule | None],
        stack: Stack,
        own: Sequence[OwnValue],
        streams: Mapping[str, JointStream],
        verdict: Verdict | None = None,
    ) -> None:
        self._names, self._schedules, self._stack = names, list(schedules), stack
        leader = next(each for each in schedules if each is not None)
        first = leader.program
        programs = [None if each is None else each.program for each in schedules]
        self._problems = [[] if each is None else [each.problems[name] for name in names] for each in programs]
        together = [leader.traced(name) for name in names]
        reasons = [
            (each.problem.name, why_untraceable(each.number, program.engine, is_fused=True))
            for each in together
            for program in filter(None, programs)
        ]
        found = [f"problems.{name}: {reason}" for name, reason in reasons if reason is not None]
        self.verdict = Verdict(is_fused=False, reason=found[0]) if found else verdict
        self._draw = [JointDraw(each, programs, streams) for each in together]
        backend = first.trace if first.trace is not None and first.trace_from == 0 else "eager"
        memories = [None if each is None else each.engine.memories for each in programs]
        self._gradients = StackedGradients(
            together, first.engine, memories, stack, own, backend, None if verdict is None else verdict.at_once
        )
        self._recorded = [name for name in names if first.problems[name].trajectory.is_kept]
        self._count, self._next_look = 0, 10
        # torch's own optimizers and schedulers draw nothing.
        self._draws = any(
            is_of_user(problem.optimizer, problem.scheduler) for problems in self._problems for problem in problems
        )

    def __call__(self, live: Sequence[bool]) -> list[Outcome]:
        """Take the steps of the live members.

        Args:
            live: which members take part.
        """
        is_off = self.verdict is not None and not self.verdict.is_fused
        # The first step is the optimizer's own, which makes its state.
        if is_off or not all(problem.num_steps for problem in self._problems[live.index(True)]):
            return self._each(live, lambda number: self._schedule(number).step_round(self._names))
        batches = [draw(live) for draw in self._draw]
        for number in _numbers(live) if self._recorded else ():
            self._record(number, batches)
        if any(isinstance(each, list) for entries in batches for entry in entries for each in entry.values()):
            # This time their shapes differ.
            return self._each(live, lambda number: self._planned(number, batches))
        try:
            found = self._gradients(batches)
            if self.verdict is None:
                return self._tried(live, batches, found)
            if self._gradients.at_once < len(live):
                self.verdict = replace(self.verdict, at_once=self._gradients.at_once)
        except NotFusedError as error:
            self.verdict = Verdict(is_fused=False, reason=error.reason)
            return self._each(live, lambda number: self._planned(number, batches))
        self._count += 1
        if self._count == self._next_look:
            self._next_look *= 10
            number = _numbers(live)[len(str(self._count)) % sum(live)]
            state = _Moving(self._schedule(number), self._stack, number)
            difference = self._difference(number, self._prepared(number, batches), found)
            state.restore()
            if difference is not None:
                text = _DIFFERENT.format(problem=difference[0], number=number, difference=difference[1])
                return [RunError(text) if is_live else None for is_live in live]
        return self._stepped(live, batches, found)

    def drop(self, number: int) -> None:
        """Forget a member that has left."""
        self._schedules[number], self._problems[number] = None, []

    def _tried(self, live: Sequence[bool], batches: Sequence[Sequence[JointBatches]], found: Found) -> list[Outcome]:
        """Take the gradients in both ways, and decide."""
        fused_s, _ = _fastest(lambda: self._gradients(batches), lambda: None)
        alone_s, reason = 0.0, ""
        before, after = {}, {}
        steps: list[list[PreparedStep] | Exception | None] = [None] * len(live)
        for number in _numbers(live):
            state = before[number] = _Moving(self._schedule(number), self._stack, number)
            try:
                seconds, prepared = _fastest(partial(self._prepared, number, batches), state.restore)
            except Exception as error:
                # A member's own; the others go on.
                steps[number] = error
                continue
            alone_s += seconds
            steps[number] = prepared
            after[number] = _Moving(self._schedule(number), self._stack, number)
            difference = self._difference(number, prepared, found)
            if difference is not None and not reason:
                reason = (
                    f"the gradient of problems.{difference[0]} differs from that of a member's own plan by "
                    f"{difference[1]:.1e} (relative): what a loss or a module holds differs by member"
                )
            state.restore()
        is_fused = not reason and fused_s <= alone_s
        if not is_fused and not reason:
            reason = "one program of all takes longer"
        at_once = self._gradients.at_once if self._gradients.at_once < len(live) else None
        self.verdict = Verdict(is_fused, fused_s, alone_s, reason, at_once)
        if is_fused:
            outcomes = self._stepped(
                [is_live and number in after for number, is_live in enumerate(live)], batches, found
            )
        else:
            for each in after.values():
                each.restore()
            outcomes = self._each(
                [number in after for number in range(len(live))], lambda number: _taken(steps[number])
            )
        return [each if isinstance(each, Exception) else out for each, out in zip(steps, outcomes, strict=True)]

    def _stepped(self, live: Sequence[bool], batches: Sequence[Sequence[JointBatches]], found: Found) -> list[Outcome]:
        """Take the optimizers' steps along the gradients of all."""
        self._gradients.commit(found, live)
        holds = found.holds
        outcomes: list[Outcome] = [{} if is_live else None for is_live in live]
        if holds is not None:
            # The others' solvers decide in another way than those of the trace.
            away = [is_live and not counts for is_live, counts in zip(live, holds, strict=True)]
            outcomes = self._each(away, lambda number: self._planned(number, batches))
            outcomes = [{} if is_live and each is None else each for is_live, each in zip(live, outcomes, strict=True)]
        there = [number for number in _numbers(live) if holds is None or holds[number]]
        for position, stacked in enumerate(found.gradients):
            rows = [*stacked.by_member()]
            problems = [self._problems[number][position] for number in there]
            contexts = [self._schedule(number).program.random for number in there] if self._draws else None
            norms = step_together(problems, [rows[number][0] for number in there], contexts)
            for number, norm in zip(there, norms, strict=True):
                result = rows[number][1]
                if isinstance(norm, Tensor):
                    result = StepResult(result.loss, {**result.metrics, "gradient_norm": norm.detach()})
                add_outcome(outcomes, number, norm if isinstance(norm, Exception) else {self._names[position]: result})
            there = [number for number in there if isinstance(outcomes[number], dict)]
        return outcomes

    def _each(self, live: Sequence[bool], take: Callable[[int], dict[str, StepResult]]) -> list[Outcome]:
        """Return what each live member's steps give, or its own error."""
        outcomes: list[Outcome] = [None] * len(live)
        for number in _numbers(live):
            try:
                with self._schedule(number).program.random:
                    outcomes[number] = take(number)
            except Exception as error:
                outcomes[number] = error
        return outcomes

    def _schedule(self, number: int) -> Schedule:
        found = self._schedules[number]
        assert found is not None
        return found

    def _planned(self, number: int, batches: Sequence[Sequence[JointBatches]]) -> dict[str, StepResult]:
        return self._schedule(number).step_round(self._names, self._drawn(number, batches))

    def _prepared(self, number: int, batches: Sequence[Sequence[JointBatches]]) -> list[PreparedStep]:
        schedule = self._schedule(number)
        with schedule.program.random:
            return schedule.prepared_round(self._names, self._drawn(number, batches))

    def _drawn(self, number: int, batches: Sequence[Sequence[JointBatches]]) -> Drawn:
        """Return the batches of one member."""
        return {
            name: [{key: _of_member(each, number) for key, each in entry.items()} for entry in entries]
            for name, entries in zip(self._names, batches, strict=True)
        }

    def _record(self, number: int, batches: Sequence[Sequence[JointBatches]]) -> None:
        recorder, drawn = self._schedule(number).program.recorder, self._drawn(number, batches)
        for name in self._recorded:
            states = [recorder.state(name) for _ in drawn[name]]
            recorder.record(name, [entry[name] for entry in drawn[name]], states)

    def _difference(self, number: int, steps: Sequence[PreparedStep], found: Found) -> tuple[str, float] | None:
        """Return a problem whose gradient is not that of the member's plan but for rounding, and by how much."""
        if found.holds is not None and not found.holds[number]:
            return None
        by_name = {step.problem.name: step.gradient for step in steps}
        for name, stacked in zip(self._names, found.gradients, strict=True):
            pairs = zip(by_name[name], stacked.gradient, strict=True)
            given = [(x, None if y is None else y[number]) for x, y in pairs]
            if any((x is None) != (y is None) for x, y in given):
                return name, 1.0
            tensors = [(x, y) for x, y in given if x is not None and y is not None]
            difference = _relative(tensors)
            # A finite difference magnifies rounding, all the more where what it measures is small.
            if tensors and not difference < 8 * torch.finfo(tensors[0][0].dtype).eps ** (1 / 3):
                return name, difference
        return None


class _Moving:
    """What the plan of one member's gradient moves: its buffers, and what its hypergradients keep.

    Args:
        schedule: the member's.
        stack: its tensors.
        number: of the member.
    """

    def __init__(self, schedule: Schedule, stack: Stack, number: int) -> None:
        self._rows = [each[number] for each in stack.tensors[stack.num_parameters :]]
        self._before = [row.clone() for row in self._rows]
        self._memories = [(memory, memory.value) for memory in schedule.program.engine.memories]

    def restore(self) -> None:
        """Put it back."""
        for row, before in zip(self._rows, self._before, strict=True):
            row.copy_(before)
        for memory, value in self._memories:
            memory.value = value


def add_outcome(outcomes: list[Outcome], number: int, found: Outcome) -> None:
    """Add what a member's steps have given to what those before have; an error takes their place."""
    before = outcomes[number]
    if isinstance(before, dict) and isinstance(found, dict):
        before.update(found)
    else:
        outcomes[number] = found


def _taken(steps: Any) -> dict[str, StepResult]:
    return {step.problem.name: step.take() for step in steps}


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


def _numbers(live: Sequence[bool]) -> list[int]:
    return [number for number, is_live in enumerate(live) if is_live]


def _of_member(batch: Any, number: int) -> Any:
    if isinstance(batch, list):
        return batch[number]
    if batch is None or batch.is_shared:
        return None if batch is None else batch.value
    return tree_map_only(Tensor, lambda tensor: tensor[number], batch.value)


def _relative(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Return how far tensors are apart, over their norm; 0 where the first ones are not finite, as then neither is."""
    distance = sum(float((x - y).detach().double().square().sum()) for x, y in pairs)
    norm = sum(float(x.detach().double().square().sum()) for x, _ in pairs)
    if not norm < float("inf"):
        return 0.0
    return (distance / norm) ** 0.5 if norm > 0 else (0.0 if distance == 0 else float("inf"))
