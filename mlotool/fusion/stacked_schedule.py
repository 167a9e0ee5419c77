"""Ticks of several programs of equal structure, in lockstep."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

from torch import Tensor

from mlotool.core.errors import RunError
from mlotool.core.user_code import is_of_user
from mlotool.fusion import stack, stacked_gradients
from mlotool.fusion.stack import Draw, NotFusedError, StackedStream, UnlikeBatchesError, reason_of
from mlotool.fusion.stacked_gradients import Drawings, FlatResult, Outcome, Positions, RoundMembers, Stacked, Verdict
from mlotool.problem.optimizers.optimizer_step import KernelGroup, take_steps
from mlotool.problem.optimizers.rule import Hyperparameters
from mlotool.problem.problem import Problem
from mlotool.program import Schedule
from mlotool.program.gradient_plan import StepResult, stepped
from mlotool.program.guard import ChangeGuard, may_change_between_ticks
from mlotool.program.trace import Looks, why_untraceable


class StackedSteps:
    """Takes the steps of one problem of several members, with the bits of `Problem.step`.

    Where they are nothing but calls of kernels, one call takes those of all members whose optimizers have the same
    settings; else each steps by itself.

    Args:
        problems: of each member that is there.
        changes: returns another number where optimizers, or what they keep, may be others than at the last step.

    Attributes:
        is_joint: whether the last step was taken by kernels alone, which run nobody's code.
    """

    def __init__(self, problems: Mapping[int, Problem], changes: Callable[[], int]) -> None:
        self._problems, self._changes = dict(problems), changes
        self.is_joint = False
        # The members and the changes that the groups are of; None where some step is more than kernels.
        self._looked_at: tuple[Sequence[int], int] | None = None
        self._groups: list[tuple[int, KernelGroup]] | None = None
        # By the settings of groups, the calls that step those that have them.
        self._kinds: list[tuple[object, ...]] = []
        self._calls: list[tuple[KernelGroup, list[tuple[int, int]]]] = []

    def drop(self, number: int) -> None:
        """Let go of a member that has left."""
        self._problems.pop(number, None)

    def __call__(
        self,
        members: Sequence[int],
        stacked: Stacked,
        hyperparameters: Sequence[Sequence[Hyperparameters] | None],
        contexts: Sequence[AbstractContextManager[None]] | None = None,
    ) -> list[Tensor | Exception | None]:
        """Take one step of some members.

        Args:
            members: their numbers.
            stacked: the gradients of all.
            hyperparameters: of each of these members, those that another problem gives.
            contexts: of each of these members, in which its step is taken by itself; None where no optimizer draws
                random numbers.

        Returns:
            By member the norm of its gradient where that is clipped, or the error of its step.
        """
        problems = [self._problems[number] for number in members]
        is_plain = contexts is None and not any(hyperparameters) and all(part is not None for part in stacked.gradient)
        calls = self._joint_calls(members, problems) if is_plain else None
        self.is_joint = calls is not None
        gradients, norms = stacked.gradients(), list[Tensor | Exception | None]()
        if calls is not None:
            rows = [(group, [gradients[number][position] for number, position in places]) for group, places in calls]
            take_steps(rows)  # type: ignore[arg-type]
        for place, (number, problem) in enumerate(zip(members, problems, strict=True)):
            try:
                if calls is not None:
                    norms.append(problem.advance())  # type: ignore[func-returns-value]
                    continue
                with nullcontext() if contexts is None else contexts[place]:
                    norms.append(stepped(problem, gradients[number], hyperparameters[place]))
            except Exception as error:
                norms.append(error)
        return norms

    def _joint_calls(
        self, members: Sequence[int], problems: Sequence[Problem]
    ) -> list[tuple[KernelGroup, list[tuple[int, int]]]] | None:
        """Return the calls that are these steps, with the places of their gradients; None if a step is more."""
        looked_at = members, self._changes()
        if looked_at != self._looked_at:
            groups = [problem.optimizer_step.kernel_groups() for problem in problems]
            pairs = [(number, group) for number, own in zip(members, groups, strict=True) for group in own or ()]
            self._looked_at, self._groups = looked_at, None if None in groups else pairs
            self._kinds = []
        if self._groups is None:
            return None
        # Schedulers, or who else sets rates, may have moved some of them.
        kinds = [group.kind() for _, group in self._groups]
        if kinds != self._kinds:
            self._kinds, alike = kinds, dict[object, list[tuple[int, KernelGroup]]]()
            for kind, pair in zip(kinds, self._groups, strict=True):
                alike.setdefault(kind, []).append(pair)
            self._calls = [_joint(pairs) for pairs in alike.values()]
        return self._calls


def _joint(pairs: Sequence[tuple[int, KernelGroup]]) -> tuple[KernelGroup, list[tuple[int, int]]]:
    """Return one group with the tensors of several, and by tensor the member and the position of its gradient."""
    groups = [group for _, group in pairs]
    joint = replace(
        groups[0],
        parameters=[*chain(*[group.parameters for group in groups])],
        vectors={name: [*chain(*[group.vectors[name] for group in groups])] for name in groups[0].vectors},
        counts=[*chain(*[group.counts for group in groups])],
    )
    return joint, [(number, position) for number, group in pairs for position in group.positions]


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
        streams: by name of the problem.
        courses: by round and kind of its batches, how solvers decided when it was traced; more come.
        verdict: what was found out before, where a sweep is gone on with.
        why_apart: returns why members are to take their steps one by one in this tick; "" where nothing is known.
        renew: called after losses and modules were evaluated by the plans, or traced.
    """

    def __init__(
        self,
        members: RoundMembers,
        streams: Mapping[str, StackedStream],
        courses: dict[str, tuple[bool, ...]],
        verdict: Verdict | None = None,
        *,
        why_apart: Callable[[], str],
        renew: Callable[[], None],
    ) -> None:
        self._members, self._names, self._stack = members, members.names, members.stack
        self._steps: list[StackedSteps] = []
        self.verdict = _unfusable(members) or verdict
        if self.verdict is not verdict:
            return
        leader, places = members.leader, range(len(members.names))
        self._draw = [Draw(leader.traced(name), members.programs, streams) for name in members.names]
        self._gradients = stacked_gradients.StackedGradients(members, courses)
        of_places = [{number: problems[place] for number, problems in members.problems.items()} for place in places]
        self._steps = [StackedSteps(problems, lambda: self._stack.changes) for problems in of_places]
        self._comparison = stacked_gradients.GradientComparison(members, self._gradients)
        self._why_apart, self._renew = why_apart, renew
        self._is_pure = False
        # The tick after the last step as one program that was compared with a plan.
        self._compared_at = self._num_looks = 0
        self._looks = Looks(leader.program.internals.tracing.run_length)
        # torch's own optimizers and schedulers draw no random numbers, and leave tensors where they are.
        self._is_foreign = any(is_of_user(x.optimizer, x.scheduler) for x in chain(*members.problems.values()))

    def __call__(self, there: Sequence[int]) -> dict[int, Outcome]:
        """Take the steps of some members, at least one."""
        tick, errors, left = self._tick(there), dict[int, Outcome](), list(there)
        is_off = bool(self._stack.reason) or (self.verdict is not None and not self.verdict.at(tick).is_fused)
        # The first step is the optimizer's own, which makes its state.
        if is_off or not all(problem.num_steps for problem in self._members.problems[there[0]]):
            return self._members.planned(there)
        positions = self._members.positions()
        batches: Drawings | None = None
        fused: FlatResult | None = None
        while left:
            batches = None
            try:
                batches = [draw(left) for draw in self._draw]
                fused = self._fused(left, batches)
                break
            except NotFusedError as error:
                # What does not fit together this time may do so later.
                if batches is not None or (self.verdict is None and not isinstance(error, UnlikeBatchesError)):
                    self._put_apart(tick, str(error))
                break
            except Exception as error:
                # Most often a member's own, such as a target that is out of range; the others go on without it.
                failures = self._failures(left, positions)
                if not failures:
                    self._put_apart(tick, reason_of(error))
                    break
                errors |= failures
                self._members.go_back(positions, left)
                for number in failures:
                    # What it has diverged to may be what an operation over all rows has refused.
                    self._stack.drop(number)
                    left.remove(number)
        if batches is not None and fused is not None and self._looks_right(left, batches, fused, errors):
            outcomes = self._stepped(left, batches, fused, positions)
        else:
            left = [number for number in left if number not in errors]
            self._members.go_back(positions, left)
            outcomes = self._members.planned(left)
        return outcomes | errors

    def drop(self, number: int) -> None:
        """Forget a member that has left."""
        self._members.drop(number)
        for step in self._steps:
            step.drop(number)

    def _failures(self, there: Sequence[int], positions: Positions) -> dict[int, Exception]:
        """Return by member the error that its batches or its plan raise by themselves; nothing moves but streams."""
        failures: dict[int, Exception] = {}
        for number in there:
            self._members.go_back(positions, [number])
            with self._members.unmoved(number):
                try:
                    self._members.prepared(number, [draw([number]) for draw in self._draw])
                except NotFusedError:
                    continue
                except Exception as error:
                    failures[number] = error
        return failures

    def _fused(self, there: Sequence[int], batches: Drawings) -> FlatResult | None:
        """Return the gradients of all; None where it turns out that one by one is the faster way.

        Raises:
            NotFusedError: they are not to be taken as one program.
        """
        tick = self._tick(there)
        if reason := self._why_apart():
            raise NotFusedError(reason)
        if not self._is_pure:
            self._comparison.check_pure(there[0], batches)
            self._is_pure = True
        if self.verdict is not None:
            self._gradients.limit(self.verdict.at(tick).at_once)
        # Of a sweep that goes on, those that have caught up.
        self._comparison.check_alike(there, batches)
        num_traces = self._gradients.num_traces
        fused = self._gradients(there, batches)
        if self.verdict is None:
            self.verdict = replace(self._comparison(there, batches, fused), since_tick=tick)
            self._compared_at = tick + 1
        elif (at_once := self._gradients.at_once) < (self.verdict.at(tick).at_once or len(there)):
            self.verdict = self.verdict.changed(tick, at_once=at_once)
        if self._gradients.num_traces > num_traces or self._compared_at == tick + 1:
            self._renew()
        return fused if self.verdict.at(tick).is_fused else None

    def _put_apart(self, tick: int, reason: str) -> None:
        """Take gradients one by one from this tick on."""
        if self.verdict is None:
            self.verdict = Verdict(is_fused=False, reason=reason, since_tick=tick)
        else:
            self.verdict = self.verdict.changed(tick, is_fused=False, reason=reason)

    def _looks_right(
        self, there: Sequence[int], batches: Drawings, fused: FlatResult, errors: dict[int, Outcome]
    ) -> bool:
        """Say whether the gradients are still those of the plans, where a look is due; else add who has wrong ones."""
        tick = self._tick(there) + 1
        is_due = self._looks.is_due(tick - 1)
        # The first step was compared when the verdict was found; but a sweep that goes on looks at once, as the record
        # of its first process may be anybody's.
        if self._compared_at == tick or (self._compared_at > 0 and not is_due):
            return True
        turn = there[self._num_looks % len(there)]
        self._num_looks += 1
        wrong = self._compared([turn], tick, batches, fused)
        if wrong:
            wrong |= self._compared([number for number in there if number != turn], tick, batches, fused)
            reason = "a gradient depends on something that changes and is not a tensor (a counter, a file, a clock)"
            self._put_apart(tick - 1, reason)
            if len(wrong) < len(there):
                warnings.warn(
                    f"Some of the fused runs had wrong gradients and were ended: {wrong[turn]} The gradients of the "
                    f"other runs are right at tick {tick}, and are computed one by one from now on; whether they were "
                    f"right since tick {self._compared_at + 1} is not known.",
                    stacklevel=2,
                )
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
                if difference := self._comparison.difference(number, batches, fused):
                    errors[number] = RunError(
                        f"problems.{difference[0]}: found a gradient in fused runs that differs from the gradient of "
                        f"this run alone by {difference[1]:.1e} (relative) at tick {tick}; expected a difference of "
                        "rounding. The loss or a module depends on a value that is not a tensor: gradients since tick "
                        f"{self._compared_at + 1} may be wrong, so the run ends. Keep the value in a buffer, or write "
                        "sweep.fuse=1."
                    )
            except Exception as error:
                errors[number] = error
        return errors

    def _tick(self, there: Sequence[int]) -> int:
        return self._members.schedules[there[0]].num_ticks

    def _stepped(
        self, there: Sequence[int], batches: Drawings, fused: FlatResult, positions: Positions
    ) -> dict[int, Outcome]:
        """Take the optimizers' steps along the gradients of all."""
        # The others' solvers decide in another way than those of the trace.
        members, away = self._members, [number for number in there if not fused.holds[number]]
        there = [number for number in there if fused.holds[number]]
        for number in there:
            members.record(number, batches)
        self._gradients.commit(fused, there)
        members.go_back(positions, away)
        outcomes = members.planned(away)
        hyperparameters: dict[int, list[tuple[Hyperparameters, ...] | None]] = {}
        for number in there:
            program = members.schedules[number].program
            outcomes[number] = {}
            try:
                # What other problems give is as it was before any of these steps.
                hyperparameters[number] = [
                    program.internals.hyperparameters(problem.name) if problem.settings.optimizer_roles else None
                    for problem in members.problems[number]
                ]
            except Exception as error:
                outcomes[number] = error
                continue
            if program.internals.is_watched(self._names):
                with program.random:
                    for name, stacked in zip(self._names, fused.gradients, strict=True):
                        program.internals.look_at(name, stacked.of(number))
        for place, (stacked, step) in enumerate(zip(fused.gradients, self._steps, strict=True)):
            there = [number for number in there if isinstance(outcomes[number], dict)]
            contexts = [members.schedules[number].program.random for number in there] if self._is_foreign else None
            norms = step(there, stacked, [hyperparameters[number][place] for number in there], contexts)
            # Else hooks of optimizers may have run.
            self._stack.changes += not step.is_joint
            for number in there if self._is_foreign else ():
                self._stack.refresh_member(number)
            results = stacked.results()
            for number, norm in zip(there, norms, strict=True):
                if isinstance(norm, Exception):
                    outcomes[number] = norm
                    continue
                metrics = {**results[number].metrics, **({} if norm is None else {"gradient_norm": norm.detach()})}
                _add(outcomes, number, {self._names[place]: StepResult(results[number].loss, metrics)})
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
        self._schedules = {number: schedule for number, schedule in enumerate(schedules) if schedule is not None}
        programs = [None if schedule is None else schedule.program for schedule in schedules]
        names = [tuple(program.problems) for program in programs if program is not None]
        if len(set(names)) > 1:
            raise NotFusedError("they have different problems")
        layout = layout or Layout()
        self._values = stack.own_values(programs, layout.own_values)
        self._streams = stack.stacked_streams(programs, layout.shares)
        self._num_members, self._stack = len(schedules), stack.Stack(programs)
        self._courses = dict(layout.courses)
        self._verdicts = dict(verdicts or {})
        self._rounds: dict[tuple[str, ...], StackedRound] = {}
        self._change, self._looked_at = "", -1
        problems = [[] if program is None else program.internals.engine.problems for program in programs]
        self._may_change = any(map(may_change_between_ticks, chain(*problems)))
        self._guard = ChangeGuard(problems)

    @property
    def layout(self) -> Layout:
        """What its program was made for."""
        shares = {name: stream.shares for name, stream in self._streams.items()}
        return Layout(shares, tuple(value.key for value in self._values), dict(self._courses))

    @property
    def verdicts(self) -> dict[str, Verdict]:
        """By round, whether its gradients are taken as one program."""
        verdicts = {"+".join(names): stacked_round.verdict for names, stacked_round in self._rounds.items()}
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
        for number in [number for number, other in self._schedules.items() if other is schedule]:
            del self._schedules[number]
            self._stack.drop(number)
            self._guard.drop(number)
            for stacked_round in self._rounds.values():
                stacked_round.drop(number)

    def tick(self, there: Sequence[int], *, may_have_changed: bool = True) -> dict[int, Outcome]:
        """Take one tick of some members, which stand at the same one.

        Args:
            there: their numbers, in order.
            may_have_changed: whether anybody's code may have run since the last tick.

        Returns:
            By member the results of the problems that have stepped, by name; or its error, after which it takes part
            no more.
        """
        self._stack.changes += may_have_changed
        outcomes: dict[int, Outcome] = {number: {} for number in there}
        schedules = {number: self._schedules[number] for number in there}
        order = schedules[there[0]].order()
        for names in order.rounds:
            for number, schedule in schedules.items():
                _try(outcomes, number, partial(schedule.begin_round, names))
            # The steps of the round before may have run somebody's code, too.
            self._stack.changes += self._may_change
            self._look()
            self._stack.refresh()
            live = [number for number, outcome in outcomes.items() if isinstance(outcome, dict)]
            for number, outcome in self._round(names)(live).items() if live else ():
                _add(outcomes, number, outcome)
            for number, schedule in schedules.items():
                if _try(outcomes, number, partial(schedule.end_round, names)):
                    # A step that is taken back moves as any other.
                    self._stack.changes += 1
                    self._stack.refresh_member(number)
            for number, schedule in [*schedules.items()]:
                if not isinstance(outcomes[number], dict):
                    # It goes no further; until it has ended, its tensors are no part of the stack.
                    self.drop(schedule)
                    del schedules[number]
            if not schedules:
                break
        for schedule in schedules.values():
            schedule.end_tick(order)
        return outcomes

    def _look(self) -> None:
        """Look whether there are hooks, or losses and modules are others than they were; once is for good."""
        if self._change or self._looked_at == self._stack.changes:
            return
        self._looked_at = self._stack.changes
        if hook := self._guard.hook():
            self._change = f"{hook}, which fused runs do not call"
        elif change := self._guard.change():
            self._change = f"{change} has changed, while a trace takes it as constant"

    def _round(self, names: tuple[str, ...]) -> StackedRound:
        if names not in self._rounds:
            schedules = [self._schedules.get(number) for number in range(self._num_members)]
            self._rounds[names] = StackedRound(
                RoundMembers(names, schedules, self._stack, self._values),
                self._streams,
                self._courses,
                self._verdicts.get("+".join(names)),
                why_apart=lambda: self._change,
                renew=self._guard.settle,
            )
        return self._rounds[names]


def _unfusable(members: RoundMembers) -> Verdict | None:
    """Return that a round is taken by the plans, where its gradients cannot be one program; None if that is open."""
    for name in members.names:
        for schedule in members.schedules.values():
            engine = schedule.program.internals.engine
            if name in schedule.program.internals.held:
                return Verdict(is_fused=False, reason=f"problems.{name}: it is held, and takes no step")
            if reason := why_untraceable(engine.numbers[name], engine, is_fused=True):
                return Verdict(is_fused=False, reason=f"problems.{name}: {reason}")
    return None


def _try(outcomes: dict[int, Outcome], number: int, call: Callable[[], Mapping[str, StepResult] | None]) -> bool:
    """Let a member that has no error yet do something, and add what it gives; return whether it gives something."""
    if not isinstance(outcomes[number], dict):
        return False
    try:
        results = call()
    except Exception as error:
        outcomes[number] = error
        return False
    _add(outcomes, number, dict(results or {}))
    return bool(results)


def _add(outcomes: dict[int, Outcome], number: int, outcome: Outcome) -> None:
    """Add what a member's steps have given to what those before have; an error takes their place."""
    before = outcomes[number]
    if isinstance(before, dict) and isinstance(outcome, dict):
        before.update(outcome)
    else:
        outcomes[number] = outcome
