"""Rounds of a tick along a trace, held to their plans."""

import math
from collections.abc import Callable, Sequence
from itertools import groupby

import torch
from torch import Tensor

from mlotool.core.errors import RunError
from mlotool.problem.problem import Problem
from mlotool.program.moment import NOW
from mlotool.program.program import Program
from mlotool.program.solution_plan import SolutionPlan, all_plans
from mlotool.program.step_result import StepResult
from mlotool.program.trace import Tracer
from mlotool.program.traced_function import Batches, Traced, UntraceableError

Drawn = dict[str, list[Batches]]
"""By problem, for each batch that its gradient is averaged over: that batch and those of its pullbacks."""

_Move = tuple[Tensor, Tensor, Tensor]
"""Where a plan and a trace have moved a tensor, and from where."""

_DIFFERENT = (
    "problems.{problem}: after {count} steps its traced steps differ from those of its plan by {difference:.1e} "
    "(relative); expected rounding. What a loss or a module keeps in Python (a counter, a rate that changes) is fixed "
    "by a trace. Keep it in a buffer, or write runner.trace=false."
)


class TracedRounds:
    """Takes rounds of a tick as one flat program; where that cannot be, by their plans.

    The first time, the tenth, hundredth and so on the plans take the steps as well, and both are compared. What the
    trace gives counts at all times, so that a resumed run, which begins with a comparison, goes on bit by bit; but not
    one that has given its trace up after some steps, which a resumed one tries anew.

    Args:
        rounds: names of problems, round after round; only those of the first one may have steps that are recorded.
        program: theirs, with a way of tracing.
        planned: takes the rounds by their plans, on batches that were drawn, without a record of them.
        give_up: told why it is to be left alone from now on.
        with_norms: as for `Schedule`.
    """

    def __init__(
        self,
        rounds: tuple[tuple[str, ...], ...],
        program: Program,
        planned: Callable[[tuple[tuple[str, ...], ...], Drawn], dict[str, StepResult]],
        give_up: Callable[[tuple[tuple[str, ...], ...], UntraceableError], None],
        *,
        with_norms: bool,
    ) -> None:
        assert program.trace is not None
        self._rounds = rounds
        engine = program.engine
        self._tracer = Tracer(
            [[_traced(name, program, with_norms) for name in names] for names in rounds], engine, program.trace
        )
        self._problems = [each.problem for each in self._tracer.steps]
        self._solutions = [[*all_plans(engine.solutions[each.number])] for each in self._tracer.steps]
        self._program = program
        self._planned = planned
        self._give_up = give_up
        self._recorded = [name for name in rounds[0] if program.problems[name].trajectory.is_kept]
        self._num_steps = 0
        self._next_comparison = 1

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
            if self._num_steps == self._next_comparison or self._program.is_watched(drawn):
                return self._compared(drawn)
            results = self._tracer([*drawn.values()])
        except UntraceableError as error:
            self._give_up(self._rounds, error)
            return self._planned(self._rounds, drawn)
        for problem in self._problems:
            problem.advance()
        return dict(zip(drawn, results, strict=True))

    def _compared(self, drawn: Drawn) -> dict[str, StepResult]:
        if self._num_steps == self._next_comparison:
            self._next_comparison *= 10
        # First, so that tracing has no copies of all that moves beside it.
        self._tracer.prepare([*drawn.values()])
        places = self._tracer.places()
        state = [place.tensor for place in places]
        # In the memory of the CPU: that of a GPU may be full.
        before = [tensor.to("cpu", copy=True) for tensor in state]
        results = self._tracer([*drawn.values()])
        after = [tensor.to("cpu", copy=True) for tensor in state]
        torch._foreach_copy_(state, before)
        # The plans' steps count, and whoever watches sees them; then all is as the trace has it.
        planned = self._planned(self._rounds, drawn)
        for name, result in zip(drawn, results, strict=True):
            self._check(name, [(planned[name].loss, result.loss, torch.zeros_like(result.loss))])
        moves = zip(places, state, after, before, strict=True)
        # A gradient as a whole: a part of it may be nothing but rounding (a bias before a BatchNorm).
        for (owner, _), group in groupby(moves, lambda move: move[0].part):
            compared = [(x.cpu(), y, z * place.decay) for place, x, y, z in group if place.decay is not None]
            self._check(owner, compared)
        torch._foreach_copy_(state, after)
        return dict(zip(drawn, results, strict=True))

    def _check(self, problem: str, moves: Sequence[_Move]) -> None:
        """Raise a RunError if the ends of planned and traced steps are further apart than rounding takes them."""
        if not moves:
            return
        difference = _difference(moves)
        # A finite difference magnifies rounding, all the more where what it measures is small.
        if not difference < 8 * torch.finfo(moves[0][0].dtype).eps ** (1 / 3):
            raise RunError(_DIFFERENT.format(problem=problem, count=self._num_steps, difference=difference))


def _traced(name: str, program: Program, with_norms: bool) -> Traced:
    return Traced.of(name, program.engine, program.plan_of(name), with_norms=with_norms)


def _drawn(problem: Problem, solutions: Sequence[SolutionPlan]) -> Batches:
    """Return a problem's next batch, and those on which the pullbacks of its gradient are taken."""
    batches = {problem.name: None if problem.stream is None else problem.stream.next()}
    for each in solutions:
        if each.problem.name not in batches:
            batches[each.problem.name] = each.pullback_batch(NOW)
    return batches


def _difference(moves: Sequence[_Move]) -> float:
    """Return how far the ends are apart, over how far the plan's are from the start; 0 if no more than by rounding."""
    distance = _norm([plan - trace for plan, trace, _ in moves])
    moved = _norm([plan - before for plan, _, before in moves])
    rounding = 4 * torch.finfo(moves[0][0].dtype).eps * _norm([plan for plan, _, _ in moves])
    return distance / (moved + rounding) if not distance <= rounding else 0.0


def _norm(tensors: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(each.detach().double().square().sum()) for each in tensors))
