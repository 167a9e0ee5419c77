"""Linear systems and determinants by their LU factors.

Torch's derivatives of these use factors that were saved. In forward mode they are constants there, and the tangents of
gradients are wrong by as much as they are long; nothing says so.
"""

# ruff: noqa: N803, N806 (arguments have the names that torch gives them)

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mlotool.core.decompositions.precision import in_float32


class SolveEx(NamedTuple):
    """What `torch.linalg.solve_ex` returns."""

    result: Tensor
    info: Tensor


class SlogDet(NamedTuple):
    """What `torch.linalg.slogdet` returns."""

    sign: Tensor
    logabsdet: Tensor


class Triangular(NamedTuple):
    """What `torch.triangular_solve` returns."""

    solution: Tensor
    cloned_coefficient: Tensor


@in_float32("cpu", "cuda")
def solve(A: Tensor, B: Tensor, *, left: bool = True) -> Tensor:
    """Return `A^-1 B = U^-1 L^-1 P^T B`, or `B A^-1`."""
    # As torch does: B is a batch of vectors where its shape is that of A without the last axis.
    is_vector = B.dim() == 1 or (A.dim() - 1 == B.dim() and B.shape == A.shape[:-1])
    if not left and not is_vector:
        return solve(A.mT, B.mT).mT
    P, L, U = torch.linalg.lu(A)
    right = P.mT @ (B.unsqueeze(-1) if is_vector else B)
    found = torch.linalg.solve_triangular(L, right, upper=False, unitriangular=True)
    found = torch.linalg.solve_triangular(U, found, upper=True)
    return found.squeeze(-1) if is_vector else found


@in_float32("cpu", "cuda")
def solve_ex(A: Tensor, B: Tensor, *, left: bool = True, check_errors: bool = False) -> SolveEx:
    """Return the same, and zeros: that nothing has gone wrong."""
    return SolveEx(solve(A, B, left=left), torch.zeros(A.shape[:-2], dtype=torch.int32, device=A.device))


@in_float32("cpu", "cuda")
def tensorsolve(A: Tensor, B: Tensor, dims: Sequence[int] | None = None) -> Tensor:
    """Return X with `tensordot(A, X) = B`."""
    moved = A if dims is None else A.movedim(tuple(dims), tuple(range(A.dim() - len(dims), A.dim())))
    shape = moved.shape[B.dim() :]
    return solve(moved.reshape(B.numel(), math.prod(shape)), B.reshape(-1)).reshape(shape)


@in_float32("cpu", "cuda")
def det(A: Tensor) -> Tensor:
    """Return `sign(P) prod U_ii`."""
    P, _, U = torch.linalg.lu(A)
    return _parity(P) * U.diagonal(dim1=-2, dim2=-1).prod(-1)


@in_float32("cpu", "cuda")
def slogdet(A: Tensor) -> SlogDet:
    """Return the sign of the determinant, and `sum log |U_ii|`."""
    P, _, U = torch.linalg.lu(A)
    diagonal = U.diagonal(dim1=-2, dim2=-1)
    return SlogDet(_parity(P) * diagonal.sgn().prod(-1), diagonal.abs().log().sum(-1))


@in_float32("cpu", "cuda")
def logdet(A: Tensor) -> Tensor:
    """Return `log det A`; NaN where that is negative."""
    sign, size = slogdet(A)
    return torch.where(sign.detach().real > 0, size, size + (sign.detach().real).sqrt().log())


@in_float32("cpu", "cuda")
def cholesky_inverse(L: Tensor, upper: bool = False) -> Tensor:
    """Return `(L L^H)^-1`, or `(L^H L)^-1`."""
    one = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)
    triangle = L.triu() if upper else L.tril()
    inverse = torch.linalg.solve_triangular(triangle, one.expand_as(L), upper=upper)
    return inverse @ inverse.mH if upper else inverse.mH @ inverse


@in_float32("cpu", "cuda")
def triangular_solve(
    b: Tensor, A: Tensor, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> Triangular:
    """Return `A^-1 b`, or `A^-T b`, and a copy of A."""
    given, is_upper = (A.mT, not upper) if transpose else (A, upper)
    found = torch.linalg.solve_triangular(given, b, upper=is_upper, unitriangular=unitriangular)
    return Triangular(found, A.clone())


def _parity(P: Tensor) -> Tensor:
    """Return the determinant of a permutation matrix: 1 for an even number of inversions, -1 for an odd one."""
    order = P.detach().real.argmax(-1)
    later = torch.ones(P.shape[-2:], dtype=torch.bool, device=P.device).triu(1)
    inversions = ((order[..., :, None] > order[..., None, :]) & later).sum((-2, -1))
    return (1 - 2 * (inversions % 2)).to(P.dtype)
