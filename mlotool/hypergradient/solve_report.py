"""How solves end: warnings of those that fail, and what the replays of a trace report."""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass, replace

from torch import Tensor

from mlotool.hypergradient.solvers import AbstractSolver, SolveResult
from mlotool.hypergradient.solvers.base import NOT_FINITE
from mlotool.hypergradient.solvers.progress import ended_with
from mlotool.problem.interface import Memory


def warn_of_failure(solver: AbstractSolver, problem: str, warned_of: set[object], result: SolveResult) -> None:
    """Warn the first time that a problem's solve ends in one of the ways that its solver counts as failures.

    Of numbers that are not finite, each time that the solve before had ended with finite ones.

    Args:
        solver: of the solve.
        problem: its name.
        warned_of: statuses that were warned of; takes this one.
        result: how the solve ended.

    Example:
        >>> from mlotool.hypergradient.solvers import Neumann, Status
        >>> warn_of_failure(Neumann(3, 0.1), "w", {Status.DIVERGED}, SolveResult([], Status.DIVERGED, 2))
    """
    status, failures = result.status, solver.failures
    if status not in NOT_FINITE:
        # The next time numbers are not finite there is a new reason.
        warned_of.difference_update(NOT_FINITE)
    if status not in failures or status in warned_of:
        return
    warned_of.add(status)
    failed = sum(each in failures for each in result.task_statuses)
    where = f" at {failed} of {len(result.task_statuses)} tasks" if failed else ""
    known: list[str] = [each.name for each in fields(solver)] if is_dataclass(solver) else []
    named = [name for name in known if name in failures[status]]
    settings = ", ".join(f"hypergradient.solver.{name}={getattr(solver, name)}" for name in named)
    now = f" Now: {settings}." if settings else ""
    warnings.warn(
        f"The {type(solver).__name__} solve at problem '{problem}' ended{where} with {status.value} after "
        f"{result.num_products} products. {failures[status]}{now}",
        stacklevel=3,
    )


@dataclass(frozen=True)
class TracedSolve:
    """A solve of a trace, of whose replays is known what they report.

    Args:
        memory: of the problem.
        last: how the solve ended.
        warn: is given what the problem was warned of, and how the solve of a replay has ended, where replays report it.
        warned_of: what the problem was warned of.

    Example:
        >>> import torch
        >>> from mlotool.hypergradient.implicit_state import ImplicitState
        >>> from mlotool.hypergradient.solvers import Status
        >>> memory = Memory(ImplicitState(None))
        >>> TracedSolve(memory, SolveResult([], Status.CONVERGED, 3)).reported(torch.tensor(0.5))
        >>> memory.value.last.residual
        tensor(0.5000)
    """

    memory: Memory
    last: SolveResult
    warn: Callable[[set[object], SolveResult], None] | None = None
    warned_of: set[object] = field(default_factory=set)

    def of(self, memory: Memory, warned_of: set[object]) -> "TracedSolve":
        """Return the same solve of a problem of equal structure in another program.

        Args:
            memory: of that one.
            warned_of: what that one was warned of.
        """
        return replace(self, memory=memory, warned_of=warned_of)

    def reported(self, values: Tensor) -> None:
        """Keep how the solve of a replay ended.

        Args:
            values: the residual, 0-D; or it (NaN where it is not known) and `SolveResult.ending`, 1-D.
        """
        last = replace(self.last, residual=values)
        if values.dim():
            residual, count, *codes = values.tolist()
            status, statuses = ended_with(codes, has_tasks=bool(self.last.task_statuses))
            last = SolveResult([], status, int(count), residual if math.isfinite(residual) else None, statuses)
            if self.warn is not None:
                self.warn(self.warned_of, last)
        self.memory.value = self.memory.value._replace(last=last)
