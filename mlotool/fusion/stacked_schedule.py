"""Ticks of several programs of equal structure, in lockstep."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

from mlotool.core.errors import RunError
from mlotool.core.user_code import is_of_user
from mlotool.fusion.comparison import CHANGED, CHANGED_LATER, CHANGED_PLACE, DIFFERENT, Comparison, Verdict
from mlotool.fusion.round_members import Outcome, Positions, RoundMembers, add_outcome, numbers
from mlotool.fusion.stack import NotFusedError, OwnValue, Stack, own_values, reason_of
from mlotool.fusion.stacked_batches import Draw, StackedStream, UnlikeBatchesError, stacked_streams
from mlotool.fusion.stacked_gradients import Drawings, FlatResult, StackedGradients
from mlotool.fusion.stacked_steps import StackedSteps
from mlotool.program import Program, Schedule
from mlotool.program.guard import Guard, may_change_between_ticks
from mlotool.program.prepared_step import StepResult
from mlotool.program.traced_rounds import Looks, why_untraceable


@dataclass
class Layout:
    """What is kept of the program of some rows, so that a sweep that goes on makes the same one.

    Members that have left meanwhile had their part in it.

    Args:
        shares: by problem, whether all members have the same samples.
        own_values: the keys of numbers and frozen parameters in which they differ.
        courses: by round and kind of its batches, how solvers decided when it was traced; empty where nothing was to
            be decided.
    """

    shares: dict[str, bool] = field(default_factory=dict)
    own_values: tuple[str, ...] = ()
    courses: dict[str, tuple[bool, ...]] = field(default_factory=dict)


class StackedRound:
    """Takes a round of steps of all members of a stack.

    The first time, each member's gradient is also taken by its own plan, which shows whether the members are what they
    seem to be, and which way is the faster one. Later one member in turn is looked at again, at first often, then a
    hundred times in a run.

    Args:
        members: of the round.
        values: those in which members differ.
        streams: by name of the problem.
        courses: by round and kind of its batches, how solvers decided when it was traced; more come.
        verdict: what was found out before, where a sweep is gone on with.
        why_apart: returns why members are to take their steps one by one in this tick; "" where nothing is known.
        renew: called after losses and modules were evaluated by the plans, or traced.
    """

    def __init__(
        self,
        members: RoundMembers,
        values: Sequence[OwnValue],
        streams: Mapping[str, StackedStream],
        courses: dict[str, tuple[bool, ...]],
        verdict: Verdict | None = None,
        *,
        why_apart: Callable[[], str],
        renew: Callable[[], None],
    ) -> None:
        self._members, self._names, self._stack = members, members.names, members.stack
        self._steps: list[StackedSteps] = []
        programs = [None if schedule is None else schedule.program for schedule in members.schedules]
        self.verdict = _unfusable(members.names, programs) or verdict
        if self.verdict is not verdict:
            return
        leader = next(schedule for schedule in members.schedules if schedule is not None)
        self._draw = [Draw(leader.traced(name), programs, streams) for name in members.names]
        self._gradients = StackedGradients(members.names, members.schedules, members.stack, values, courses)
        stack, changes = members.stack, lambda: members.stack.changes
        self._steps = [
            StackedSteps([each[place] if each else None for each in members.problems], stack.parameters(name), changes)
            for place, name in enumerate(members.names)
        ]
        self._comparison = Comparison(members, self._gradients, values)
        self._why_apart, self._renew = why_apart, renew
        self._is_pure = False
        # Steps as one program, and the tick of the last one that was compared with a plan.
        self._count = self._compared_at = 0
        self._looks, self._num_looks = Looks(leader.program.run_length), 0
        # torch's own optimizers and schedulers draw no random numbers, and leave tensors where they are.
        problems = [problem for each in members.problems for problem in each]
        self._is_foreign = any(is_of_user(problem.optimizer, problem.scheduler) for problem in problems)

    def __call__(self, live: Sequence[bool]) -> list[Outcome]:
        """Take the steps of the live members.

        Args:
            live: which members take part.
        """
        tick, errors, left = self._tick(live), dict[int, Exception](), list(live)
        is_off = bool(self._stack.reason) or (self.verdict is not None and not self.verdict.at(tick).is_fused)
        # The first step is the optimizer's own, which makes its state.
        if is_off or not all(problem.num_steps for problem in self._members.problems[live.index(True)]):
            return self._members.planned(live)
        positions = self._members.positions()
        while any(left):
            batches: Drawings | None = None
            fused: FlatResult | None = None
            try:
                batches = [draw(left) for draw in self._draw]
                fused = self._fused(left, batches)
            except NotFusedError as error:
                # What does not fit together this time may do so later.
                if batches is not None or (self.verdict is None and not isinstance(error, UnlikeBatchesError)):
                    self._put_apart(tick, str(error))
            except Exception as error:
                # Most often a member's own, such as a target that is out of range; the others go on without it.
                if failures := self._failures(left, positions):
                    errors |= failures
                    self._members.go_back(positions, left)
                    for number in failures:
                        # What it has diverged to may be what an operation over all rows has refused.
                        self._stack.drop(number)
                        left[number] = False
                    continue
                self._put_apart(tick, reason_of(error))
            if batches is not None and fused is not None and self._looks_right(left, batches, fused, errors):
                outcomes = self._stepped(left, batches, fused, positions)
            else:
                left = [is_live and number not in errors for number, is_live in enumerate(left)]
                self._members.go_back(positions, left)
                outcomes = self._members.planned(left)
            return [errors.get(number, outcome) for number, outcome in enumerate(outcomes)]
        return [errors.get(number) for number in range(len(live))]

    def drop(self, number: int) -> None:
        """Forget a member that has left."""
        self._members.drop(number)
        for step in self._steps:
            step.drop(number)

    def _failures(self, live: Sequence[bool], positions: Positions) -> dict[int, Exception]:
        """Return by member the error that its batches or its plan raise by themselves; nothing moves but streams."""
        failures: dict[int, Exception] = {}
        for number in numbers(live):
            alone, moving = [other == number for other in range(len(live))], self._members.moving(number)
            self._members.go_back(positions, alone)
            try:
                self._members.prepared(number, [draw(alone) for draw in self._draw])
            except NotFusedError:
                continue
            except Exception as error:
                failures[number] = error
            finally:
                moving.restore()
        return failures

    def _fused(self, live: Sequence[bool], batches: Drawings) -> FlatResult | None:
        """Return the gradients of all; None where it turns out that one by one is the faster way.

        Raises:
            NotFusedError: they are not to be taken as one program.
        """
        tick = self._tick(live)
        if reason := self._why_apart():
            raise NotFusedError(reason)
        if not self._is_pure:
            self._comparison.check_pure(live, batches)
            self._is_pure = True
        if self.verdict is not None:
            self._gradients.limit(self.verdict.at(tick).at_once)
        # Of a sweep that goes on, those that have caught up.
        self._comparison.check_alike(live, batches)
        num_traces = self._gradients.num_traces
        fused = self._gradients(live, batches)
        if self._gradients.num_traces > num_traces:
            self._renew()
        if self.verdict is None:
            self.verdict = replace(self._comparison(live, batches, fused), since_tick=tick)
            self._renew()
            self._compared_at = tick + 1
            return fused if self.verdict.is_fused else None
        at_once = self._gradients.at_once
        if at_once < (self.verdict.at(tick).at_once or len(live)):
            self.verdict = self.verdict.changed(tick, at_once=at_once)
        return fused

    def _put_apart(self, tick: int, reason: str) -> None:
        """Take gradients one by one from this tick on."""
        if self.verdict is None:
            self.verdict = Verdict(is_fused=False, reason=reason, since_tick=tick)
        else:
            self.verdict = self.verdict.changed(tick, is_fused=False, reason=reason)

    def _looks_right(
        self, live: Sequence[bool], batches: Drawings, fused: FlatResult, errors: dict[int, Exception]
    ) -> bool:
        """Say whether the gradients are still those of the plans, where a look is due; else add who has wrong ones."""
        self._count += 1
        # A sweep that goes on looks at once: the record of its first process may be anybody's. Else the first step has
        # been compared when the verdict was found.
        is_due = self._looks.is_due(self._tick(live)) and self._count > 1
        if self._compared_at > 0 and not is_due:
            return True
        there, tick = numbers(live), self._tick(live) + 1
        # In the first ten steps one member, in the first hundred another one, and then one after the other.
        turn = there[(len(str(self._count)) if self._count < 100 else self._num_looks) % len(there)]
        self._num_looks += 1
        wrong = self._compared([turn], tick, batches, fused)
        if wrong:
            wrong |= self._compared([number for number in there if number != turn], tick, batches, fused)
            self._put_apart(tick - 1, CHANGED)
            if len(wrong) < len(there):
                text = CHANGED_LATER.format(tick=tick, since=self._compared_at + 1, error=wrong[turn])
                warnings.warn(text, stacklevel=2)
            errors |= wrong
        else:
            self._compared_at = tick
        self._renew()
        return not wrong

    def _compared(
        self, members: Sequence[int], tick: int, batches: Drawings, fused: FlatResult
    ) -> dict[int, Exception]:
        """Return by member an error, where its gradients are not those of its plan."""
        errors: dict[int, Exception] = {}
        for number in members:
            try:
                if (difference := self._comparison.difference(number, batches, fused)) is not None:
                    problem, distance = difference
                    since = self._compared_at + 1
                    text = DIFFERENT.format(problem=problem, difference=distance, tick=tick, since=since)
                    errors[number] = RunError(text)
            except Exception as error:
                errors[number] = error
        return errors

    def _tick(self, live: Sequence[bool]) -> int:
        return self._members.schedule(live.index(True)).num_ticks

    def _stepped(
        self, live: Sequence[bool], batches: Drawings, fused: FlatResult, positions: Positions
    ) -> list[Outcome]:
        """Take the optimizers' steps along the gradients of all."""
        members, there = self._members, [number for number in numbers(live) if fused.holds[number]]
        for number in there:
            members.record(number, batches)
        self._gradients.commit(fused, live)
        # The others' solvers decide in another way than those of the trace.
        away = [is_live and number not in there for number, is_live in enumerate(live)]
        members.go_back(positions, away)
        outcomes = members.planned(away)
        hyperparameters = {}
        for number in there:
            outcomes[number] = {}
            try:
                # What other problems give is as it was before any of these steps.
                hyperparameters[number] = members.hyperparameters(number)
            except Exception as error:
                outcomes[number] = error
                continue
            program = members.schedule(number).program
            if program.is_watched(self._names):
                with program.random:
                    for name, stacked in zip(self._names, fused.gradients, strict=True):
                        program.look_at(name, stacked.of(number))
        for position, (stacked, step) in enumerate(zip(fused.gradients, self._steps, strict=True)):
            there = [number for number in there if isinstance(outcomes[number], dict)]
            contexts = [members.schedule(number).program.random for number in there] if self._is_foreign else None
            norms = step(there, stacked, [hyperparameters[number][position] for number in there], contexts)
            # Else hooks of optimizers may have run.
            self._stack.changes += not step.is_joint
            for number in there if self._is_foreign else ():
                self._stack.refresh_member(number)
            results = stacked.results()
            for number, norm in zip(there, norms, strict=True):
                if isinstance(norm, Exception):
                    outcomes[number] = norm
                    continue
                result = results[number]
                if norm is not None:
                    result = StepResult(result.loss, {**result.metrics, "gradient_norm": norm.detach()})
                add_outcome(outcomes, number, {self._names[position]: result})
        return outcomes


class StackedSchedule:
    """Takes the ticks of the members of a stack.

    Each member's schedule counts its ticks, its problems take their own steps, and its streams go on as they would
    alone; their gradients are taken by one program where that gains.

    Args:
        schedules: those of the members; None has left, and keeps its place.
        verdicts: by round (the names of its problems, joined by "+"), what was found out before.
        layout: what the program of these rows was made for, where a sweep is gone on with; None finds it out.

    Raises:
        NotFusedError: the members differ in structure; nothing has changed.
    """

    def __init__(
        self,
        schedules: Sequence[Schedule | None],
        verdicts: Mapping[str, Verdict] | None = None,
        layout: Layout | None = None,
    ) -> None:
        self.schedules = list(schedules)
        programs = [None if schedule is None else schedule.program for schedule in schedules]
        names = [tuple(program.problems) for program in programs if program is not None]
        if len(set(names)) > 1:
            raise NotFusedError("they have different problems")
        layout = layout or Layout()
        self._values = own_values(programs, layout.own_values)
        streams = {
            name: [None if program is None else program.problems[name].stream for program in programs]
            for name in names[0]
        }
        shares = layout.shares if layout.shares.keys() >= streams.keys() else None
        self._streams = stacked_streams(streams, shares=shares)
        self._stack = Stack(programs)
        self._courses = dict(layout.courses)
        self._verdicts = dict(verdicts or {})
        self._rounds: dict[tuple[str, ...], StackedRound] = {}
        self._change, self._looked_at = "", -1
        problems = [[] if program is None else program.engine.problems for program in programs]
        self._may_change = any(map(may_change_between_ticks, chain(*problems)))
        self._guard = Guard(problems)

    @property
    def layout(self) -> Layout:
        """What its program was made for."""
        shares = {name: stream.shares for name, stream in self._streams.items()}
        return Layout(shares, tuple(value.key for value in self._values), dict(self._courses))

    @property
    def verdicts(self) -> dict[str, Verdict]:
        """By round, whether its gradients are taken as one program."""
        verdicts = {"+".join(names): each.verdict for names, each in self._rounds.items()}
        return self._verdicts | {name: verdict for name, verdict in verdicts.items() if verdict is not None}

    @property
    def reason(self) -> str:
        """Why its members cannot be a stack any more; "" where they can."""
        return self._stack.reason

    def refresh(self) -> None:
        """Look whether members have put other tensors in the place of theirs, before some ticks."""
        self._stack.changes += 1
        self._stack.refresh()

    def drop(self, schedule: Schedule | None) -> None:
        """Forget a member that has left; its row stays."""
        for number, other in enumerate(self.schedules):
            if other is schedule and other is not None:
                self.schedules[number] = None
                self._stack.drop(number)
                self._guard.drop(number)
                for each in self._rounds.values():
                    each.drop(number)

    def tick(self, live: Sequence[bool], *, may_have_changed: bool = True) -> list[Outcome]:
        """Take one tick of the live members, which stand at the same one.

        Args:
            live: which members take part.
            may_have_changed: whether anybody's code may have run since the last tick.

        Returns:
            By member the results of the problems that have stepped, by name; or its error, after which it takes part
            no more; None of one that took no part.
        """
        self._stack.changes += may_have_changed
        outcomes: list[Outcome] = [{} if is_live else None for is_live in live]
        there = {number: each for number, each in enumerate(self.schedules) if live[number] and each is not None}
        order = next(iter(there.values())).order()
        for names in order.rounds:
            for number, schedule in there.items():
                _try(outcomes, number, partial(schedule.begin_round, names))
            # The steps of the round before may have run somebody's code, too.
            self._stack.changes += self._may_change
            self._look()
            self._stack.refresh()
            live = [isinstance(outcome, dict) for outcome in outcomes]
            for number, outcome in enumerate(self._round(names)(live) if any(live) else ()):
                if live[number]:
                    add_outcome(outcomes, number, outcome)
            for number, schedule in there.items():
                if _try(outcomes, number, partial(schedule.end_round, names)):
                    # A step that is taken back moves as any other.
                    self._stack.changes += 1
                    self._stack.refresh_member(number)
            for number, schedule in [*there.items()]:
                if not isinstance(outcomes[number], dict):
                    # It goes no further; until it has ended, its tensors are no part of the stack.
                    self.drop(schedule)
                    del there[number]
            if not there:
                break
        for schedule in there.values():
            schedule.end_tick(order)
        return outcomes

    def _look(self) -> None:
        """Look whether there are hooks, or losses and modules are others than they were; once is for good."""
        if self._change or self._looked_at == self._stack.changes:
            return
        self._looked_at = self._stack.changes
        if hook := self._guard.hook():
            self._change = f"{hook}, which one program of several runs does not call"
        elif change := self._guard.change():
            self._change = CHANGED_PLACE.format(place=change)

    def _round(self, names: tuple[str, ...]) -> StackedRound:
        if names not in self._rounds:
            self._rounds[names] = StackedRound(
                RoundMembers(names, self.schedules, self._stack),
                self._values,
                self._streams,
                self._courses,
                self._verdicts.get("+".join(names)),
                why_apart=lambda: self._change,
                renew=self._guard.settle,
            )
        return self._rounds[names]


def _unfusable(names: Sequence[str], programs: Sequence[Program | None]) -> Verdict | None:
    """Return that a round is taken by the plans, where its gradients cannot be one program; None if that is open."""
    for name in names:
        for program in filter(None, programs):
            reason = why_untraceable(program.engine.numbers[name], program.engine, is_fused=True)
            if reason is not None:
                return Verdict(is_fused=False, reason=f"problems.{name}: {reason}")
    return None


def _try(outcomes: list[Outcome], number: int, call: Callable[[], Mapping[str, StepResult] | None]) -> bool:
    """Let a member that has no error yet do something, and add what it gives; return whether it gives something."""
    if not isinstance(outcomes[number], dict):
        return False
    try:
        results = call()
    except Exception as error:
        outcomes[number] = error
        return False
    add_outcome(outcomes, number, dict(results or {}))
    return bool(results)
