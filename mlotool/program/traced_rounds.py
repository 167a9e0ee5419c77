"""Rounds of a tick along a trace, held to their plans."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mlotool.core.errors import RunError
from mlotool.problem.compatibility import Case, broken, reason
from mlotool.problem.interface import AbstractDirector
from mlotool.problem.problem import Problem
from mlotool.problem.settings import ProblemSettings
from mlotool.program.agreement import ROUNDING, SAME, Kind, Values, distances, sensitivity
from mlotool.program.guard import why_foreign
from mlotool.program.loss_plan import NOW
from mlotool.program.prepared_step import StepResult
from mlotool.program.program import Program
from mlotool.program.solution_plan import Engine, SolutionPlan, all_plans
from mlotool.program.trace import Batches, Place, Traced, Tracer, UntraceableError


def why_untraceable(number: int, engine: Engine, *, is_fused: bool = False) -> str | None:
    """Return why a problem's gradients cannot be traced; None where nothing is known against it.

    Args:
        number: of the problem.
        engine: of the program.
        is_fused: for a program of several runs, beside which each takes its steps by itself; else for one that takes
            the steps too.
    """
    cases = (replace(case, is_traced=not is_fused, is_fused=is_fused) for case in _cases(number, engine))
    return next((reason(row, case) for case in cases for row in broken(case)), None)


def _cases(number: int, engine: Engine) -> Iterator[Case]:
    """Yield the problem itself, those that play a role in its loss, and the solutions that its gradient passes."""
    problem, num_ranks = engine.problems[number], 1 if engine.rank_mean.is_alone else 2
    # Whether a module is compiled, divided or evaluated again concerns every loss in which it plays a role; see below.
    settings = replace(problem.settings, compile=False, shard=False, remat=None)
    yield Case(problem.name, settings, problem.parallel, problem.optimizer, num_ranks=num_ranks, module=problem.module)
    own, is_kept = problem.hypergradient, problem.trajectory.is_kept
    is_seen = own is not None and is_kept and (own.keeps_graphs or not own.trajectory.is_whole)
    if is_seen or isinstance(own, AbstractDirector):
        yield Case(problem.name, ProblemSettings(), algorithm=own)
    for player in [engine.problems[engine.numbers[role.problem]] for role in problem.roles.values()]:
        is_compiled, is_sharded = player.compiled is not None, player.shards is not None
        held = ProblemSettings(compile=is_compiled, shard=is_sharded, remat=player.settings.remat)
        yield Case(player.name, held, module=player.module)
    for plan in all_plans(engine.solutions[number]):
        yield Case(plan.problem.name, ProblemSettings(), algorithm=plan.algorithm)


Rounds = tuple[tuple[str, ...], ...]
"""Names of problems that step together, round after round."""

Drawn = dict[str, list[Batches]]
"""By problem, for each batch that its gradient is averaged over: that batch and those of its pullbacks."""

STEPS_BETWEEN_LOOKS = 100
"""Where the length of a run is not known; a comparison takes a planned step beside the traced one."""

_EARLY_LOOKS = (1, 2, 3, 5, 10, 20, 50, 100)

_DIFFERENT = (
    "after {count} steps its traced steps differ from those of its plan by {difference:.1e} ({kind}, relative); "
    "expected rounding, of {rounding:.1e} at most. What a loss or a module keeps in Python (a counter, a rate that "
    "changes) is fixed by a trace. Keep it in a buffer, or write runner.trace=false."
)


class TracedRounds:
    """Takes rounds of a tick as one flat program; where that cannot be, by their plans.

    At its first steps, and then once in a hundredth of the run, the plans take the steps as well, and all that steps
    move is compared: parameters, buffers, what optimizers keep. What the trace gives counts at all times, so that a
    resumed run, which begins with a comparison, goes on bit by bit; but not one that has given its trace up after some
    steps, which a resumed one tries anew.

    Args:
        rounds: names of problems, round after round; only those of the first one may have steps that are recorded.
        parts: of the ticks, which hear of what cannot be traced.
    """

    def __init__(self, rounds: Rounds, parts: "TickParts") -> None:
        self._rounds, self._parts, self._program = rounds, parts, parts.program
        engine, backend = self._program.engine, self._program.trace
        assert backend is not None
        steps = [[parts.traced(name) for name in names] for names in rounds]
        self._tracer = Tracer(steps, engine, backend, traces_users_code=self._program.traces_users_code)
        self._problems = [each.problem for each in self._tracer.steps]
        self._solutions = [[*all_plans(engine.solutions[each.number])] for each in self._tracer.steps]
        self._recorded = [name for name in rounds[0] if self._program.problems[name].trajectory.is_kept]
        self._num_steps = self._last_look = 0
        self._looks = Looks(self._program.run_length)
        self._rounding: dict[Kind, float] = {}

    def __call__(self) -> dict[str, StepResult]:
        """Take the steps; return their results by problem."""
        drawn = {
            problem.name: [_drawn(problem, solutions) for _ in range(problem.settings.accumulate_batches)]
            for problem, solutions in zip(self._problems, self._solutions, strict=True)
        }
        for name in self._recorded:
            states = [self._program.recorder.state(name) for _ in drawn[name]]
            self._program.recorder.record(name, [entry[name] for entry in drawn[name]], states)
        self._num_steps += 1
        try:
            if self._looks.is_due(self._parts.num_ticks()) or self._program.is_watched(drawn):
                return self._compared(drawn)
            results = self._tracer([*drawn.values()])
        except UntraceableError as error:
            self._parts.give_up(self._rounds, error)
            return self._parts.planned(self._rounds, drawn)
        for problem in self._problems:
            problem.advance()
        return dict(zip(drawn, results, strict=True))

    def _compared(self, drawn: Drawn) -> dict[str, StepResult]:
        """Take the steps in both ways.

        Raises:
            RunError: they differ, and so may those have since the last comparison.
        """
        batches = [*drawn.values()]
        # First: where `places` binds what is there now, a change since the last step would not be seen.
        self._tracer.look()
        places = self._tracer.places()
        before = _copies(places)
        results = dict(zip(drawn, self._tracer(batches), strict=True))
        traced = _copies(places)
        _put(places, before)
        # The plans' steps count, and whoever watches sees them; then all is as the trace has it.
        planned = self._parts.planned(self._rounds, drawn)
        ends = _by_kind(self._tracer.places(), planned)
        problem, difference = self._difference(ends, _by_kind(places, results, traced), places, before, batches)
        was_compared, self._last_look = self._last_look == self._num_steps - 1, self._num_steps
        if difference and not was_compared:
            raise RunError(f"problems.{problem}: {difference}")
        if difference:
            # Nothing is lost: all steps until now were compared, and this one is the plan's.
            self._parts.give_up(self._rounds, UntraceableError(difference, problem))
            return planned
        _put(self._tracer.places(), traced)
        self._tracer.renew_guard()
        return results

    def _difference(
        self,
        planned: Values,
        traced: Values,
        places: Sequence[Place],
        before: Sequence[Tensor],
        batches: Sequence[Sequence[Batches]],
    ) -> tuple[str, str]:
        """Return the problem whose planned and traced steps are further apart than rounding takes them, and a text."""
        unit, start = self._tracer.unit(), _by_kind(places, {}, before)
        apart, kinds = distances(planned, traced, start, unit), [kind for (_, kind), _ in places]

        def limit(kind: Kind) -> float:
            return max(unit**SAME, ROUNDING * self._rounding.get(kind, 0.0))

        def take(parameters: Sequence[Tensor]) -> Values | None:
            others = iter(parameters)
            _put(
                self._tracer.places(),
                [next(others) if x == "parameters" else y for x, y in zip(kinds, before, strict=True)],
            )
            kept = [memory.value for memory in self._program.engine.memories]
            results = self._tracer.again(batches)
            for memory, value in zip(self._program.engine.memories, kept, strict=True):
                memory.value = value
            if results is None:
                return None
            names = [problem.name for problem in self._problems]
            return _by_kind(self._tracer.places(), dict(zip(names, results, strict=True)))

        if not all(each <= limit(kind) for kind, each in apart.items()):
            end = _copies(self._tracer.places())
            # Of the trace, which is a function of tensors: a plan's step is one of modules, optimizers and schedulers.
            parameters = [tensor for kind, tensor in zip(kinds, before, strict=True) if kind == "parameters"]
            for kind, each in sensitivity(take, parameters, start, unit).items():
                self._rounding[kind] = max(each, self._rounding.get(kind, 0.0))
            _put(self._tracer.places(), end)
        for kind, each in apart.items():
            if not each <= limit(kind):
                return kind[0], _DIFFERENT.format(
                    count=self._num_steps, difference=each, kind=kind[1], rounding=limit(kind)
                )
        return "", ""


def _copies(places: Sequence[Place]) -> list[Tensor]:
    """Return copies of all that steps move, in the memory of the CPU (that of a GPU may be full)."""
    return [tensor.to("cpu", copy=True) for _, tensor in places]


def _put(places: Sequence[Place], tensors: Sequence[Tensor]) -> None:
    torch._foreach_copy_([tensor for _, tensor in places], [*tensors])


def _by_kind(
    places: Sequence[Place], results: Mapping[str, StepResult], tensors: Sequence[Tensor] | None = None
) -> dict[Kind, list[Tensor]]:
    """Return what is in the places, or others in their order, by problem and kind, and the losses of steps."""
    kinds: dict[Kind, list[Tensor]] = {(name, "loss"): [x.loss.detach().cpu()] for name, x in results.items()}
    for (kind, _), tensor in zip(places, _copies(places) if tensors is None else tensors, strict=True):
        kinds.setdefault(kind, []).append(tensor)
    return kinds


class Looks:
    """Tells at which of its steps a trace is compared with the plans.

    At its first steps, and then once in a hundredth of the ticks of a run, and at its last one. Where the length of the
    run is not known, every 100th tick, or hundredth of the ticks so far.

    Args:
        run_length: ticks of the whole run; None where that is not known.

    Example:
        >>> looks = Looks(run_length=2_500)
        >>> [tick for tick in range(100, 200) if looks.is_due(tick)]
        [100, 101, 102, 104, 109, 119, 144, 149, 174, 199]
    """

    def __init__(self, run_length: int | None) -> None:
        self._run_length = run_length
        self._num_steps = self._last_tick = 0

    def is_due(self, tick: int) -> bool:
        """Say whether the step that comes is one of them; called once a step.

        Args:
            tick: how many ticks were taken before.
        """
        self._num_steps += 1
        between = STEPS_BETWEEN_LOOKS if self._run_length is None else max(1, self._run_length // 100)
        is_late = tick - self._last_tick >= max(between, tick // 100)
        is_last = self._run_length is not None and tick + 1 == self._run_length
        is_due = self._num_steps in _EARLY_LOOKS or is_late or is_last
        if is_due:
            self._last_tick = tick
        return is_due


def _drawn(problem: Problem, solutions: Sequence[SolutionPlan]) -> Batches:
    """Return a problem's next batch, and those on which the pullbacks of its gradient are taken."""
    batches = {problem.name: None if problem.stream is None else problem.stream.next()}
    for each in solutions:
        if each.problem.name not in batches:
            batches[each.problem.name] = each.pullback_batch(NOW)
    return batches


@dataclass(frozen=True, slots=True)
class Part:
    """Rounds of a tick that follow each other.

    Args:
        rounds: several along a trace, one by its plan.
        traced: takes their steps; None leaves them to the plans.
    """

    rounds: Rounds
    traced: TracedRounds | None = None


class TickParts:
    """Divides ticks into parts, made once for each kind of tick.

    Rounds that follow each other are one trace. A problem that cannot be traced steps by its plan, and so do those of
    its round; a warning says once why.

    Args:
        program: with a way of tracing, or none.
        traced: returns what a trace of a problem's gradient takes.
        planned: takes rounds by their plans, on batches that were drawn, without a record of them.
        num_ticks: returns how many ticks have been taken.
    """

    def __init__(
        self,
        program: Program,
        traced: Callable[[str], Traced],
        planned: Callable[[Rounds, Drawn], dict[str, StepResult]],
        num_ticks: Callable[[], int],
    ) -> None:
        self.program, self.traced, self.planned, self.num_ticks = program, traced, planned, num_ticks
        # The first step is the optimizer's own, which makes its state.
        self._begin = max(program.trace_from, 1)
        self._engine = program.engine
        self._known: dict[tuple[Rounds, tuple[bool, ...]], list[Part]] = {}
        self._traced: dict[Rounds, TracedRounds] = {}
        self._reasons: dict[str, str] = {}
        self._is_split = False
        for name, number in self._engine.numbers.items() if program.trace is not None else ():
            reason = why_untraceable(number, self._engine)
            if reason is None:
                self._engine.traced_from[number] = program.trace_from
                continue
            self._reasons[name] = reason
            # Where tracing begins late nobody has asked for it.
            if program.trace_from == 0:
                _warn(name, reason)

    def __call__(self, rounds: Rounds) -> list[Part]:
        """Return the parts of a tick."""
        problems = [] if self.program.trace is None else self._engine.problems
        key = rounds, tuple([problem.num_steps >= self._begin for problem in problems])
        if key not in self._known:
            self._known[key] = self._divided(*key)
        return self._known[key]

    def _divided(self, rounds: Rounds, has_begun: Sequence[bool]) -> list[Part]:
        # Rounds that follow each other, and whether they are traced.
        groups: list[tuple[list[tuple[str, ...]], bool]] = []
        problems, numbers, is_closed = self.program.problems, self._engine.numbers, True
        for names in rounds:
            is_traced = self.program.trace is not None and not any(name in self._reasons for name in names)
            is_traced = is_traced and all(has_begun[numbers[name]] for name in names) and self._may_trace()
            # What is recorded of a step is what there is before it.
            begins = is_closed or self._is_split or any(problems[name].trajectory.is_kept for name in names)
            if begins or not (is_traced and groups[-1][1]):
                groups.append(([], is_traced))
            groups[-1][0].append(names)
            # The problems below go back to where they were before anything else steps.
            lowers = [lower for name in names for lower in self.program.graph.lowers(name)]
            is_closed = any(problems[lower].settings.roll_back for lower in lowers)
        for rounds in [tuple(together) for together, is_traced in groups if is_traced]:
            if rounds not in self._traced:
                self._traced[rounds] = TracedRounds(rounds, self)
        return [Part(tuple(names), self._traced[tuple(names)] if is_traced else None) for names, is_traced in groups]

    def _may_trace(self) -> bool:
        """Return whether no code but torch's and mlotool's takes part, where a user's is not to be traced."""
        if self.program.traces_users_code or self._traced:
            return True
        reasons = {each.name: why_foreign(each) for each in self._engine.problems}
        self._reasons |= {name: reason for name, reason in reasons.items() if reason is not None}
        return not any(reasons.values())

    def give_up(self, rounds: Rounds, error: UntraceableError) -> None:
        """Leave rounds to their plans from now on, or to a trace each where it is not known which of them fails."""
        self._known.clear()
        del self._traced[rounds]
        if error.problem is None and len(rounds) > 1:
            # One by one they may do, or tell which of them does not.
            self._is_split = True
            return
        for name in [name for names in rounds for name in names] if error.problem is None else [error.problem]:
            self._reasons[name] = str(error)
            self._engine.traced_from.pop(self._engine.numbers[name], None)
            _warn(name, str(error))


def _warn(name: str, reason: str) -> None:
    warnings.warn(
        f"problems.{name}: its steps are not traced: {reason}. They are taken as without a trace. "
        "Write runner.trace=false to leave it so.",
        stacklevel=2,
    )
