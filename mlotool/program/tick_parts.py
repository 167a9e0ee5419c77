"""Which rounds of a tick run along one trace, and which by their plans."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mlotool.program.guard import why_foreign
from mlotool.program.program import Program
from mlotool.program.step_result import StepResult
from mlotool.program.traced_function import UntraceableError
from mlotool.program.traced_rounds import Drawn, TracedRounds
from mlotool.program.untraceable import why_untraceable

Rounds = tuple[tuple[str, ...], ...]
"""Names of problems that step together, round after round."""


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
        planned: takes rounds by their plans, on batches that were drawn.
        with_norms: as for `Schedule`.
        num_ticks: returns how many ticks have been taken.
    """

    def __init__(
        self,
        program: Program,
        planned: Callable[[Rounds, Drawn], dict[str, StepResult]],
        *,
        with_norms: bool,
        num_ticks: Callable[[], int],
    ) -> None:
        self._program = program
        self._planned = planned
        self._with_norms, self._num_ticks = with_norms, num_ticks
        # The first step is the optimizer's own, which makes its state.
        self._begin = max(program.trace_from, 1)
        self._engine = program.engine
        self._known: dict[tuple[Rounds, tuple[bool, ...]], list[Part]] = {}
        self._traced: dict[Rounds, TracedRounds] = {}
        self._reasons: dict[str, str] = {}
        self._is_split = False
        if program.trace is not None:
            self._look()

    def __call__(self, rounds: Rounds) -> list[Part]:
        """Return the parts of a tick."""
        if self._program.trace is None:
            key: tuple[Rounds, tuple[bool, ...]] = rounds, ()
        else:
            begin = self._begin
            key = rounds, tuple([problem.num_steps >= begin for problem in self._engine.problems])
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._divided(*key)
        return found

    def _look(self) -> None:
        """Find out who cannot be traced."""
        for name, number in self._engine.numbers.items():
            reason = why_untraceable(number, self._engine)
            if reason is None:
                self._engine.traced_from[number] = self._program.trace_from
            else:
                self._reasons[name] = reason
                # Where tracing begins late nobody has asked for it.
                if self._program.trace_from == 0:
                    _warn(name, reason)

    def _divided(self, rounds: Rounds, has_begun: Sequence[bool]) -> list[Part]:
        parts: list[Part] = []
        together: list[tuple[str, ...]] = []

        def close() -> None:
            if together:
                parts.append(Part(tuple(together), self._trace_of(tuple(together))))
                together.clear()

        problems, numbers = self._program.problems, self._engine.numbers
        for names in rounds:
            # What is recorded of a step is what there is before it.
            if self._is_split or any(problems[name].trajectory.is_kept for name in names):
                close()
            is_traced = self._program.trace is not None and not any(name in self._reasons for name in names)
            if is_traced and all(has_begun[numbers[name]] for name in names) and self._may_trace():
                together.append(names)
            else:
                close()
                parts.append(Part((names,)))
            # The problems below go back to where they were before anything else steps.
            if any(problems[lower].settings.roll_back for name in names for lower in self._program.graph.lowers(name)):
                close()
        close()
        return parts

    def _may_trace(self) -> bool:
        """Return whether no code but torch's and mlotool's takes part, where a user's is not to be traced."""
        if self._program.traces_users_code or self._traced:
            return True
        reasons = {each.name: why_foreign(each) for each in self._engine.problems}
        self._reasons |= {name: reason for name, reason in reasons.items() if reason is not None}
        return not any(reasons.values())

    def _trace_of(self, rounds: Rounds) -> TracedRounds:
        if rounds not in self._traced:
            assert self._program.trace is not None
            self._traced[rounds] = TracedRounds(
                rounds,
                self._program,
                self._planned,
                self._give_up,
                with_norms=self._with_norms,
                num_ticks=self._num_ticks,
            )
        return self._traced[rounds]

    def _give_up(self, rounds: Rounds, error: UntraceableError) -> None:
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
