"""Training steps along a traced gradient, held to the plan's."""

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mlotool.core.errors import RunError
from mlotool.core.loss_output import LossOutput
from mlotool.core.slots import Slots
from mlotool.program.engine import Engine
from mlotool.program.gradient_plan import Gradient
from mlotool.program.moment import NOW, Moment
from mlotool.program.solution_plan import all_plans
from mlotool.program.trace import Tracer, UntraceableError
from mlotool.program.training_gradient import AbstractGradient, Differentiated

_DIFFERENT = (
    "problems.{problem}: after {count} steps its traced gradient differs from that of its plan by {difference:.1e} "
    "(relative); expected rounding. What a loss or a module keeps in Python (a counter, a rate that changes) is fixed "
    "by a trace. Keep it in a buffer, or write runner.trace=false."
)


class Traced(AbstractGradient):
    """A gradient whose training steps run as a flat program; where that cannot be, as its plan.

    The first step, and the tenth, hundredth and so on, take both, and compare them. The trace's is used at all steps,
    so that a resumed run, which begins with a comparison, goes on bit by bit; but not one that has given its trace up
    after some steps, which a resumed one tries anew.

    Args:
        number: of the problem.
        engine: of the program.
        plan: of the gradient.
        backend: as for `Tracer`.
        begin: the problem's step from which on it is traced.
    """

    def __init__(self, number: int, engine: Engine, plan: Differentiated, backend: str, begin: int) -> None:
        self._problem = engine.problems[number]
        self._solutions = list(all_plans(engine.solutions[number]))
        self._plan = plan
        self._begin = begin
        self._tracer = Tracer(number, engine, plan.plan, backend)
        self._is_given_up = False
        self._num_steps = 0
        self._next_comparison = 1

    def live(self, batch: Any) -> tuple[LossOutput, Gradient]:
        """Return loss and gradient."""
        if self._is_given_up or self._problem.num_steps < self._begin:
            return self._plan.live(batch)
        batches = {self._problem.name: batch}
        for each in self._solutions:
            batches.setdefault(each.problem.name, each.pullback_batch(NOW))
        self._num_steps += 1
        try:
            if self._num_steps == self._next_comparison:
                self._next_comparison *= 10
                return self._compared(batch, batches)
            return self._tracer(batches)
        except UntraceableError as reason:
            self._give_up(reason)
            return self._plan.live(batch)

    def pure(self, batch: Any, moment: Moment) -> Gradient:
        """Return the gradient by the plan."""
        return self._plan.pure(batch, moment)

    def _give_up(self, reason: UntraceableError) -> None:
        self._is_given_up = True
        warnings.warn(
            f"problems.{self._problem.name}: its gradient is not traced: {reason}. It is taken as without a trace. "
            "Write runner.trace=false to leave it so.",
            stacklevel=2,
        )

    def _compared(self, batch: Any, batches: dict[str, Any]) -> tuple[LossOutput, Gradient]:
        slots = self._problem.slots
        before = [buffer.clone() for buffer in slots.buffers()]
        output, gradient = plan = self._plan.live(batch)
        moved = [buffer.clone() for buffer in slots.buffers()]
        _fill(slots, before)
        try:
            found = self._tracer(batches)
        except UntraceableError as reason:
            self._give_up(reason)
            _fill(slots, moved)
            return plan
        is_alike = [each is None for each in gradient] == [each is None for each in found[1]]
        # Of the whole gradient: a part of it may be nothing but rounding (a bias before a BatchNorm).
        pairs = [([output.loss], [found[0].loss]), (moved, slots.buffers()), (_present(gradient), _present(found[1]))]
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
    is_plain = problem.settings.precision != "fp16" and not problem.evaluates_again
    is_plain = is_plain and all(each.compiled is None and each.shards is None for each in played)
    return is_plain and all(each.algorithm.is_traceable for each in all_plans(engine.solutions[number]))


def _fill(slots: Slots, values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for buffer, value in zip(slots.buffers(), values, strict=True):
            buffer.copy_(value)


def _present(gradient: Gradient) -> list[Tensor]:
    return [each for each in gradient if each is not None]


def _relative(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    pairs = [(x.detach().double(), y.detach().double()) for x, y in zip(a, b, strict=True)]
    scale = math.sqrt(sum(float(x.square().sum()) for x, _ in pairs))
    distance = math.sqrt(sum(float((x - y).square().sum()) for x, y in pairs))
    return distance if scale == 0.0 else distance / scale
