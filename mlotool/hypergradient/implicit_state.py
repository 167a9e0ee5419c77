"""What implicit differentiation keeps from one pullback to the next."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from mlotool.hypergradient.diagnostics.quality import Quality
from mlotool.hypergradient.solvers import SolveResult, Status
from mlotool.hypergradient.vector import copies, is_finite
from mlotool.problem.interface import LowerProblem, Vector


class ImplicitState(NamedTuple):
    """What is kept.

    Args:
        solver: what the solver keeps.
        last: how the last solve ended, without its solution.
        quality: the last report.
        num_pullbacks: so far, where every n-th is reported.
        starts: by reader, the last solution, where solves begin there.

    Example:
        >>> state = ImplicitState(None, last=SolveResult([], Status.CONVERGED, 3, 1e-7))
        >>> state.saved()
        {'last': ['converged', 3, 1e-07]}
    """

    solver: Any
    last: SolveResult | None = None
    quality: Quality | None = None
    num_pullbacks: int = 0
    starts: Mapping[str, Vector] | None = None

    def saved(self) -> dict[str, Any]:
        """Return what is reported, in plain containers, where there is any."""
        saved: dict[str, Any] = {}
        if self.last is not None and self.last.residual is not None:
            saved["last"] = [self.last.status.value, self.last.num_products, float(self.last.residual)]
        if self.quality is not None:
            saved["quality"] = [self.quality.residual, self.quality.cosine]
        return saved

    @classmethod
    def loaded(cls, saved: Mapping[str, Any], solver: Any) -> "ImplicitState":
        """Return the state that was saved, with that of the solver."""
        # Older checkpoints have the starts by "<problem> for <reader>".
        starts = {key.rpartition(" for ")[2]: copies(start) for key, start in saved.get("starts", {}).items()}
        last = None
        if "last" in saved:
            # Its status was said when it happened, in words that may be others now.
            _, num_products, residual = saved["last"]
            last = SolveResult([], Status.FIXED, num_products, residual)
        quality = Quality(*saved["quality"]) if "quality" in saved else None
        return cls(solver, last, quality, saved.get("num_pullbacks", 0), starts or None)


def start_for(problem: LowerProblem, vector: Vector) -> list[Tensor] | None:
    """Return the last solution for the problem's reader if it fits `vector`; None to begin at zero.

    Example:
        >>> import torch
        >>> from mlotool.problem.interface import Memory
        >>> problem = LowerProblem("w", reader="u", memory=Memory(ImplicitState(None)))
        >>> keep_start(problem, [torch.ones(2)])
        >>> start_for(problem, [torch.zeros(2)]), start_for(problem, [torch.zeros(3)])
        ([tensor([1., 1.])], None)
    """
    start = (problem.memory.value.starts or {}).get(problem.reader, ())
    if [(each.shape, each.dtype) for each in start] != [(each.shape, each.dtype) for each in vector]:
        return None
    return [each.to(like.device) for each, like in zip(start, vector, strict=True)]


def keep_start(problem: LowerProblem, solution: Vector) -> None:
    """Keep a solution for the reader's next start, if it is finite.

    Example:
        >>> import torch
        >>> from mlotool.problem.interface import Memory
        >>> problem = LowerProblem("w", reader="u", memory=Memory(ImplicitState(None)))
        >>> keep_start(problem, [torch.ones(2)])
        >>> problem.memory.value.starts
        {'u': (tensor([1., 1.]),)}
    """
    state: ImplicitState = problem.memory.value
    if is_finite(solution):
        problem.memory.value = state._replace(starts={**(state.starts or {}), problem.reader: tuple(solution)})
