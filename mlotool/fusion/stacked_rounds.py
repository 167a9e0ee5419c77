"""A round of steps of all members: their gradients by one program, held to the members' own plans, or one by one."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from mlotool.core.errors import RunError
from mlotool.core.user_code import is_of_user
from mlotool.fusion.comparison import Comparison, Moving
from mlotool.fusion.errors import NotFusedError, reason_of
from mlotool.fusion.feed import JointStream
from mlotool.fusion.joint_draw import JointDraw
from mlotool.fusion.joint_steps import step_together
from mlotool.fusion.own_values import OwnValue
from mlotool.fusion.planned_rounds import Outcome, PlannedRound
from mlotool.fusion.python_state import PythonState
from mlotool.fusion.stack import Stack
from mlotool.fusion.stacked_gradients import Found, JointBatches, StackedGradients
from mlotool.fusion.verdict import DIFFERENT, UNLIKE, UNTRUE, Verdict
from mlotool.problem.update import Hyperparameters
from mlotool.program import Schedule
from mlotool.program.prepared_step import PreparedStep
from mlotool.program.step_result import StepResult
from mlotool.program.traced_function import UntraceableError
from mlotool.program.traced_rounds import Drawn

REPEATS = 3
"""Times that each way is measured; the shortest counts."""


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
        self._names, self._stack = names, stack
        leader = next(each for each in schedules if each is not None)
        first = leader.program
        programs = [None if each is None else each.program for each in schedules]
        self._problems = [[] if each is None else [each.problems[name] for name in names] for each in programs]
        self._alone = PlannedRound(names, schedules, stack)
        self.verdict = verdict
        together = [leader.traced(name) for name in names]
        self._draw = [JointDraw(each, programs, streams) for each in together]
        backend = first.trace if first.trace is not None and first.trace_from == 0 else "eager"
        memories = [None if each is None else each.engine.memories for each in programs]
        self._gradients = StackedGradients(
            together, first.engine, memories, stack, own, backend, None if verdict is None else verdict.at_once
        )
        self._comparison = Comparison(names, self._alone.schedules, stack, own)
        self._recorded = [name for name in names if first.problems[name].trajectory.is_kept]
        self._count, self._next_look = 0, 10
        # torch's own optimizers and schedulers draw no random numbers, and leave tensors where they are.
        self._is_foreign = any(
            is_of_user(problem.optimizer, problem.scheduler) for problems in self._problems for problem in problems
        )

    def __call__(self, live: Sequence[bool]) -> list[Outcome]:
        """Take the steps of the live members.

        Args:
            live: which members take part.
        """
        is_off = bool(self._stack.reason) or (self.verdict is not None and not self.verdict.is_fused)
        # The first step is the optimizer's own, which makes its state.
        if is_off or not all(problem.num_steps for problem in self._problems[live.index(True)]):
            return self._alone(live)
        batches = [draw(live) for draw in self._draw]
        if any(isinstance(each, list) for entries in batches for entry in entries for each in entry.values()):
            # This time their shapes differ, or one cannot be read.
            return self._alone.each(live, lambda number: self._planned(number, batches, is_recorded=False))
        for number in _numbers(live) if self._recorded else ():
            self._record(number, batches)
        try:
            if self.verdict is None:
                self._check_alike(live, batches)
            found = self._gradients(batches)
            if self.verdict is None:
                return self._tried(live, batches, found)
            if self._gradients.at_once < len(live):
                self.verdict = replace(self.verdict, at_once=self._gradients.at_once)
        except NotFusedError as error:
            self.verdict = Verdict(is_fused=False, reason=error.reason)
            return self._alone.each(live, lambda number: self._planned(number, batches))
        except Exception as error:
            outcomes = self._alone.each(live, lambda number: self._planned(number, batches))
            # Else it is that member's own, such as a target that is out of range.
            if not any(isinstance(each, Exception) for each in outcomes):
                self.verdict = Verdict(is_fused=False, reason=reason_of(error))
            return outcomes
        self._count += 1
        if self._count == self._next_look:
            self._next_look *= 10
            number = _numbers(live)[len(str(self._count)) % sum(live)]
            if (wrong := self._looked_at(number, batches, found)) is not None:
                return [wrong if is_live else None for is_live in live]
        return self._stepped(live, batches, found)

    def drop(self, number: int) -> None:
        """Forget a member that has left."""
        self._alone.drop(number)
        self._problems[number] = []

    def _looked_at(self, number: int, batches: Sequence[Sequence[JointBatches]], found: Found) -> RunError | None:
        """Return an error where a member's gradients are not those of its plan any more."""
        state = Moving(self._alone.schedule(number), self._stack, number)
        try:
            prepared = self._prepared(number, batches)
            state.restore()
            difference = self._difference(number, prepared, batches, found)
        finally:
            state.restore()
        if difference is None:
            return None
        return RunError(DIFFERENT.format(problem=difference[0], number=number, difference=difference[1]))

    def _check_alike(self, live: Sequence[bool], batches: Sequence[Sequence[JointBatches]]) -> None:
        first = _numbers(live)[0]
        schedule = self._alone.schedule(first)
        moving, state = Moving(schedule, self._stack, first), PythonState(schedule.program)
        try:
            self._prepared(first, batches)
            state.check()
        finally:
            state.restore()
            moving.restore()
        for number in _numbers(live):
            try:
                difference = self._comparison.of_leader(number, self._drawn(number, batches))
            except UntraceableError as error:
                raise NotFusedError(str(error)) from error
            except Exception:
                # A member's own: its plan raises it as well.
                continue
            if difference is not None:
                raise NotFusedError(UNLIKE.format(problem=difference[0], difference=difference[1]))

    def _tried(self, live: Sequence[bool], batches: Sequence[Sequence[JointBatches]], found: Found) -> list[Outcome]:
        """Take the gradients in both ways, and decide."""
        fused_s, _ = _fastest(lambda: self._gradients(batches), lambda: None)
        alone_s, reason = 0.0, ""
        before, after = {}, {}
        steps: list[list[PreparedStep] | Exception | None] = [None] * len(live)
        for number in _numbers(live):
            state = before[number] = Moving(self._alone.schedule(number), self._stack, number)
            try:
                seconds, prepared = _fastest(partial(self._prepared, number, batches), state.restore)
            except Exception as error:
                # A member's own; the others go on.
                steps[number] = error
                continue
            alone_s += seconds
            steps[number] = prepared
            after[number] = Moving(self._alone.schedule(number), self._stack, number)
            state.restore()
            difference = self._difference(number, prepared, batches, found)
            state.restore()
            if difference is not None and not reason:
                reason = UNTRUE.format(problem=difference[0], difference=difference[1])
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
            outcomes = self._alone.each(
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
            outcomes = self._alone.each(away, lambda number: self._planned(number, batches))
            outcomes = [{} if is_live and each is None else each for is_live, each in zip(live, outcomes, strict=True)]
        there, given = [], {}
        for number in [number for number in _numbers(live) if holds is None or holds[number]]:
            try:
                # What other problems give is as it was before any of these steps.
                given[number] = self._given(number)
                there.append(number)
            except Exception as error:
                outcomes[number] = error
        for position, stacked in enumerate(found.gradients):
            rows = [*stacked.by_member()]
            steps = [(self._problems[number][position], rows[number][0], given[number][position]) for number in there]
            contexts = [self._alone.schedule(number).program.random for number in there] if self._is_foreign else None
            norms = step_together(steps, contexts)
            for number in there if self._is_foreign else ():
                self._stack.refresh_member(number)
            for number, norm in zip(there, norms, strict=True):
                result = rows[number][1]
                if isinstance(norm, Tensor):
                    result = StepResult(result.loss, {**result.metrics, "gradient_norm": norm.detach()})
                add_outcome(outcomes, number, norm if isinstance(norm, Exception) else {self._names[position]: result})
            there = [number for number in there if isinstance(outcomes[number], dict)]
        return outcomes

    def _given(self, number: int) -> list[tuple[Hyperparameters, ...] | None]:
        """Return by problem the hyperparameters of its optimizer, where other problems give some of them."""
        program = self._alone.schedule(number).program
        return [
            program.hyperparameters(each.name) if each.settings.optimizer_roles else None
            for each in self._problems[number]
        ]

    def _planned(
        self, number: int, batches: Sequence[Sequence[JointBatches]], *, is_recorded: bool = True
    ) -> dict[str, StepResult]:
        if self._recorded and not is_recorded:
            self._record(number, batches)
        return self._alone.schedule(number).step_round(self._names, self._drawn(number, batches))

    def _prepared(self, number: int, batches: Sequence[Sequence[JointBatches]]) -> list[PreparedStep]:
        schedule = self._alone.schedule(number)
        with schedule.program.random:
            return schedule.prepared_round(self._names, self._drawn(number, batches))

    def _drawn(self, number: int, batches: Sequence[Sequence[JointBatches]]) -> Drawn:
        """Return the batches of one member."""
        return {
            name: [{key: _of_member(each, number) for key, each in entry.items()} for entry in entries]
            for name, entries in zip(self._names, batches, strict=True)
        }

    def _record(self, number: int, batches: Sequence[Sequence[JointBatches]]) -> None:
        recorder, drawn = self._alone.schedule(number).program.recorder, self._drawn(number, batches)
        for name in self._recorded:
            states = [recorder.state(name) for _ in drawn[name]]
            recorder.record(name, [entry[name] for entry in drawn[name]], states)

    def _difference(
        self,
        number: int,
        steps: Sequence[PreparedStep],
        batches: Sequence[Sequence[JointBatches]],
        found: Found,
    ) -> tuple[str, float] | None:
        """Return a problem whose gradient is not that of the member's plan but for rounding, and by how much."""
        if found.holds is not None and not found.holds[number]:
            return None
        gradients = {name: each.of(number) for name, each in zip(self._names, found.gradients, strict=True)}
        again = partial(self._prepared, number, batches)
        return self._comparison.of_program(number, steps, gradients, found.flat.unit, again)


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
        if isinstance(batch[number], Exception):
            raise batch[number]
        return batch[number]
    if batch is None or batch.is_shared:
        return None if batch is None else batch.value
    return tree_map_only(Tensor, lambda tensor: tensor[number], batch.value)
