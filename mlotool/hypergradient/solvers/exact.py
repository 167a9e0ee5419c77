"""The dense solve: the oracle."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mlotool.core.errors import ConfigError
from mlotool.hypergradient.solvers.base import AbstractSolver, Matvec, SolveResult, Status
from mlotool.hypergradient.vector import add, norm
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
        if bool(info != 0) or not bool(torch.isfinite(found).all()):
            found, status = torch.linalg.pinv(matrix, hermitian=True) @ flat, Status.SINGULAR
        residual = float(
            norm(add([matrix @ found], [flat], -1.0)) / norm([flat]).clamp_min(torch.finfo(flat.dtype).tiny)
        )
        return SolveResult(_unflat(found, vector), status, size, residual)


def _flat(vector: Vector) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in vector])


def _unflat(flat: Tensor, like: Vector) -> list[Tensor]:
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view_as(tensor) for part, tensor in zip(parts, like, strict=True)]
