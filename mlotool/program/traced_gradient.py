"""Training steps along a traced gradient, held to the plan's."""

import warnings
from typing import Any

import torch
from torch import Tensor

from mlotool.core.errors import RunError
from mlotool.core.loss_output import LossOutput
from mlotool.program.differentiation import AbstractHypergradient
from mlotool.program.engine import Engine
from mlotool.program.gradient_plan import Gradient
from mlotool.program.moment import NOW, Moment
from mlotool.program.solution_plan import all_plans
from mlotool.program.trace import Tracer, UntraceableError
from mlotool.program.training_gradient import AbstractGradient, Differentiated

MOST_DEVIATIONS = 3
"""Steps in a row that may leave the course of the trace before it is given up."""

_DIFFERENT = (
    "problems.{problem}: after {count} steps its traced gradient differs from that of its plan by {difference:.1e} "
    "(relative); expected rounding. What a loss or a module keeps in Python (a counter, a rate that changes) is fixed "
    "by a trace. Keep it in a buffer, or write runner.trace=false."
)


class Traced(AbstractGradient):
    """A gradient whose training steps run as a flat program; where that cannot be, as its plan.

    The first step, and the tenth, hundredth and so on, take both, and compare them. The trace's is used at all steps,
    so that a resumed run, which begins with a comparison, goes on bit by bit.

    Args:
        number: of the problem.
        engine: of the program.
        plan: of the gradient.
        backend: as for `Tracer`.
    """

    def __init__(self, number: int, engine: Engine, plan: Differentiated, backend: str) -> None:
        self._problem = engine.problems[number]
        self._lowers = [each.problem for each in all_plans(engine.solutions[number])]
        self._solutions = list(all_plans(engine.solutions[number]))
        self._plan = plan
        self._tracer = Tracer(number, engine, plan.plan, backend)
        self._is_given_up = False
        self._num_deviations = 0
        self._num_steps = 0
        self._next_comparison = 1

    def live(self, batch: Any) -> tuple[LossOutput, Gradient]:
        """Return loss and gradient."""
        if self._is_given_up:
            return self._plan.live(batch)
        batches = {self._problem.name: batch}
        for each in self._solutions:
            batches.setdefault(each.problem.name, each.pullback_batch(NOW))
        self._num_steps += 1
        try:
            if self._num_steps == self._next_comparison:
                self._next_comparison *= 10
                return self._compared(batch, batches)
            found = self._tracer(batches)
        except UntraceableError as reason:
            return self._by_plan(batch, reason)
        self._num_deviations = 0
        return found

    def pure(self, batch: Any, moment: Moment) -> Gradient:
        """Return the gradient by the plan."""
        return self._plan.pure(batch, moment)

    def _by_plan(self, batch: Any, reason: UntraceableError) -> tuple[LossOutput, Gradient]:
        self._num_deviations += 1
        if reason.__cause__ is not None or self._num_deviations >= MOST_DEVIATIONS:
            self._is_given_up = True
            warnings.warn(
                f"problems.{self._problem.name}: its gradient is not traced, for {reason}. It is taken as without a "
                "trace. Write runner.trace=false to leave it so.",
                stacklevel=2,
            )
        return self._plan.live(batch)

    def _compared(self, batch: Any, batches: dict[str, Any]) -> tuple[LossOutput, Gradient]:
        slots = self._problem.slots
        before = [buffer.clone() for buffer in slots.buffers()]
        output, gradient = self._plan.live(batch)
        moved = [buffer.clone() for buffer in slots.buffers()]
        for buffer, value in zip(slots.buffers(), before, strict=True):
            buffer.copy_(value)
        try:
            found = self._tracer(batches)
        except UntraceableError:
            for buffer, value in zip(slots.buffers(), before, strict=True):
                buffer.copy_(value)
            raise
        is_alike = [each is None for each in gradient] == [each is None for each in found[1]]
        pairs = [(output.loss, found[0].loss), *zip(moved, slots.buffers(), strict=True)]
        pairs += [(a, b) for a, b in zip(gradient, found[1], strict=True) if a is not None and b is not None]
        difference = max(_relative(a, b) for a, b in pairs) if is_alike else float("inf")
        # A finite difference magnifies rounding.
        if not difference < 20 * torch.finfo(output.loss.dtype).eps ** 0.5:
            count = self._num_steps
            raise RunError(_DIFFERENT.format(problem=self._problem.name, count=count, difference=difference))
        return found


def can_be_traced(number: int, engine: Engine) -> bool:
    """Return whether a trace of a problem's gradient could hold: nothing in it remembers, decides or draws anew.

    Args:
        number: of the problem.
        engine: of the program.
    """
    problem = engine.problems[number]
    played = [engine.problems[engine.numbers[role.problem]] for role in problem.roles.values()]
    is_plain = problem.precision != "fp16" and not problem.evaluates_again
    is_plain = is_plain and all(each.compiled is None and each.shards is None for each in played)
    return is_plain and all(_keeps_nothing(each.algorithm) for each in all_plans(engine.solutions[number]))


def _keeps_nothing(algorithm: AbstractHypergradient) -> bool:
    return algorithm.is_traceable


def _relative(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    scale, distance = float(torch.linalg.vector_norm(a)), float(torch.linalg.vector_norm(a - b))
    return distance if scale == 0.0 else distance / scale
