"""The dense solve: the oracle."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mlotool.core.errors import ConfigError
from mlotool.hypergradient.solvers.base import AbstractSolver, Matvec, SolveResult, Status
from mlotool.program.differentiation import Vector


@dataclass
class Exact(AbstractSolver):
    """Builds `H + damping I` column by column and solves by LU.

    A singular matrix gives the least-squares solution of least norm, with a status that says so.

    Args:
        damping: added to the diagonal.
        max_parameters: refuses problems with more, since the matrix has their square.

    Cost: p products and p^2 memory for p parameters.

    Example:
        >>> import torch
        >>> Exact().solve(lambda u: [2.0 * u[0]], [torch.ones(2)]).solution
        [tensor([0.5000, 0.5000])]
    """

    damping: float = 0.0
    max_parameters: int = 5000

    def __post_init__(self) -> None:
        if not self.damping >= 0 or self.max_parameters < 1:
            raise ConfigError(
                f"Exact: found damping={self.damping}, max_parameters={self.max_parameters}; expected damping >= 0 and "
                "max_parameters >= 1. Correct hypergradient.solver."
            )

    def solve(self, matvec: Matvec, vector: Vector) -> SolveResult:
        """Return the solution up to rounding."""
        sizes = [tensor.numel() for tensor in vector]
        size = sum(sizes)
        if size > self.max_parameters:
            raise ConfigError(
                f"The Exact solver met a problem of {size} parameters, a matrix of {size**2 * 8 / 2**30:.1f} GiB in "
                f"float64; expected at most max_parameters={self.max_parameters}. "
                "Use hypergradient=cg, or raise hypergradient.solver.max_parameters."
            )
        matrix = torch.stack([_flat(matvec(_unflat(row, vector))) for row in torch.eye(size).to(_flat(vector))])
        matrix = 0.5 * (matrix + matrix.T) + self.damping * torch.eye(size, dtype=matrix.dtype, device=matrix.device)
        flat = _flat(vector)
        if not bool(torch.isfinite(matrix).all()):
            return SolveResult(list(vector), Status.NON_FINITE, size)
        found, info = torch.linalg.solve_ex(matrix, flat)
        status = Status.CONVERGED
        # LU of a matrix that is singular up to rounding succeeds, with a residual that tells.
        if bool(info != 0) or not _residual(matrix, found, flat) < torch.finfo(flat.dtype).eps ** 0.5:
            found, status = torch.linalg.pinv(matrix, hermitian=True) @ flat, Status.SINGULAR
        return SolveResult(_unflat(found, vector), status, size, _residual(matrix, found, flat))


def _residual(matrix: Tensor, found: Tensor, flat: Tensor) -> float:
    smallest = torch.finfo(flat.dtype).tiny
    return float(torch.linalg.vector_norm(matrix @ found - flat) / torch.linalg.vector_norm(flat).clamp_min(smallest))


def _flat(vector: Vector) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in vector])


def _unflat(flat: Tensor, like: Vector) -> list[Tensor]:
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view_as(tensor) for part, tensor in zip(parts, like, strict=True)]
