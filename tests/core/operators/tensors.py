"""Arithmetic, indices, linear algebra, Fourier transforms."""

import torch
from torch import Tensor

from tests.core.operators.building import CHOICE, LABELS, MASK, ZERO, ZEROS, Operators, assigned, symmetric, zeroed


def _logarithm(values: Tensor, vectors: Tensor) -> Tensor:
    return (vectors * values.log()) @ vectors.mT


_NAMES = {
    "r3,4": """
        exp expm1 sin cos tan sinh cosh tanh atan asinh erf erfc abs square sigmoid sinc sum mean amax amin max min
        median nanmedian prod std var sign nansum trunc frac nan_to_num positive neg deg2rad round ceil nanmean cov
        corrcoef norm
    """,
    "p3,4": "log log2 log10 log1p sqrt rsqrt reciprocal lgamma digamma exp2 i0",
    "u3,4": "asin acos atanh logit erfinv",
    "r3,4 p3,4": "div mul sub add true_divide atan2 hypot maximum minimum fmax fmin fmod remainder copysign",
    "p3,4 p3,4": "pow logaddexp logaddexp2 xlogy",
    "r3,4 r4,2": "matmul mm",
    "r2,3,4 r2,4,2": "bmm",
    "r4 r4": "dot outer inner vdot",
    "r3,4 r4": "mv",
    "r3 r3": "cartesian_prod",
    "r4": "diff trapezoid cumulative_trapezoid combinations",
    "r3,3": "trace diag tril",
    "r2,3 r2,3": "dist",
    "r2,3 r3,2": "kron",
    "r3,4 r3,4 r3,4": "lerp addcmul",
    "r3,2 r3,4 r4,2": "addmm",
    "r2,3,2 r2,3,4 r2,4,2": "baddbmm",
}
_LINEAR = {
    "r3,4": "norm vector_norm",
    "r3,2": "pinv svdvals",
    "r3,3": "matrix_exp",
    "s3,3": "det inv cond",
    "r2,3,3": "det",
    "r2,3 r2,3": "cross",
    "r3,2 r2": "householder_product",
    "r3,3 r3": "tensorsolve",
    "s3,3 r3,2": "solve",
    "s3,3 r3": "solve",
    "r2,3,3 r2,3,2": "solve",
}
TENSORS: Operators = {
    **{name: (spec, getattr(torch, name)) for spec, names in _NAMES.items() for name in names.split()},
    **{f"linalg.{x} of {spec}": (spec, getattr(torch.linalg, x)) for spec, xs in _LINEAR.items() for x in xs.split()},
    "special.zeta": ("p3,4", lambda x: torch.special.zeta(torch.full_like(x, 3.0), x)),
    "logsumexp": ("r3,4", lambda x: x.logsumexp(-1)),
    "cumsum": ("r3,4", lambda x: x.cumsum(0)),
    "cumprod": ("r3,4", lambda x: x.cumprod(0)),
    "cumprod with a zero": ("r3,4", lambda x: zeroed(x, ZERO).cumprod(0)),
    "cumprod with two zeros": ("r3,4", lambda x: zeroed(x, ZEROS).cumprod(1)),
    "prod dim": ("r3,4", lambda x: x.prod(0)),
    "sort": ("r3,4", lambda x: x.sort(-1)[0]),
    "topk": ("r3,4", lambda x: x.topk(2)[0]),
    "gather": ("r2,3", lambda x: x.gather(1, CHOICE)),
    "masked_scatter": ("r3,3 r9", lambda x, y: x.masked_scatter(MASK, y)),
    "masked_scatter of nothing": ("r3,3", lambda x: x.masked_scatter(MASK & ~MASK, x.new_empty(0))),
    "scatter_add": ("r2,3 r2,2", lambda x, y: x.scatter_add(1, CHOICE, y)),
    "scatter_reduce sum": ("r2,3 r2,2", lambda x, y: x.scatter_reduce(1, CHOICE, y, "sum")),
    "scatter_reduce mean": ("r2,3 r2,2", lambda x, y: x.scatter_reduce(1, CHOICE, y, "mean")),
    "scatter_reduce amax": ("r2,3 r2,2", lambda x, y: x.scatter_reduce(1, CHOICE, y, "amax")),
    "scatter_reduce prod": ("r2,3 r2,2", lambda x, y: x.scatter_reduce(1, CHOICE, y, "prod")),
    "index_put": ("r4,3 r3,3", lambda x, y: x.index_put((LABELS,), y, accumulate=True)),
    "index_reduce": ("r4,3 r3,3", lambda x, y: x.index_reduce(0, LABELS, y, "mean")),
    "item assignment": ("r4,3 r3", lambda x, y: assigned(x, y)),
    "where": ("r3,3 r3,3", lambda x, y: torch.where(MASK, x, y)),
    "clamp": ("r3,4", lambda x: x.clamp(-0.5, 0.5)),
    "einsum": ("r2,3 r3,4 r4", lambda x, y, z: torch.einsum("ij,jk,k->i", x, y, z)),
    "linalg.svd": ("r3,2", lambda x: torch.linalg.svd(x, full_matrices=False)[1]),
    "linalg.eigh": ("s3,3", lambda x: _logarithm(*torch.linalg.eigh(symmetric(x)))),
    "linalg.cholesky": ("s3,3", lambda x: torch.linalg.cholesky(symmetric(x))),
    "linalg.solve right": ("s3,3 r2,3", lambda x, y: torch.linalg.solve(x, y, left=False)),
    "linalg.solve_triangular": ("s3,3 r3,2", lambda x, y: torch.linalg.solve_triangular(x, y, upper=True)),
    "cholesky_inverse": ("s3,3", lambda x: torch.cholesky_inverse(torch.linalg.cholesky(symmetric(x)))),
    "linalg.solve_ex": ("r3,3 r3,2", lambda x, y: torch.linalg.solve_ex(x, y)[0]),
    "triangular_solve": ("r3,2 s3,3", lambda y, x: torch.triangular_solve(y, x)[0]),
    "prod with a zero": ("r3,4", lambda x: zeroed(x, ZERO).prod()),
    "prod dim with a zero": ("r3,4", lambda x: zeroed(x, ZERO).prod(0)),
    "prod with two zeros": ("r3,4", lambda x: zeroed(x, ZEROS).prod(1)),
    "prod of all with two zeros": ("r3,4", lambda x: zeroed(x, ZEROS).prod()),
    "norm at zero": ("r3,4", lambda x: (x * 0.0).norm() + x.sum()),
    "segment_reduce": ("r4,2", lambda x: torch.segment_reduce(x, "sum", lengths=torch.tensor([3, 1]))),
    "igamma": ("p3,4", lambda x: torch.igamma(torch.full_like(x, 2.0), x)),
    "ormqr": ("r3,2 r2 r3,2", torch.ormqr),
    "aminmax": ("r3,4", lambda x: sum(torch.aminmax(x))),
    "chain of steps in place": ("r3,4 r3,4", lambda x, y: (x * 1.0).mul_(y).add_(x).tanh_()),
    "linalg.slogdet": ("s3,3", lambda x: torch.linalg.slogdet(x)[1]),
    "logdet": ("s3,3", torch.logdet),
    "rfft": ("r3,4", lambda x: torch.fft.irfft(torch.fft.rfft(x).exp())),
    "complex": ("r3,4 r3,4", lambda x, y: (torch.complex(x, y).exp() * torch.polar(x.abs(), y)).angle()),
    "torch.func.vmap": ("r3,4 r4", lambda x, y: torch.vmap(lambda a: (a * y).sin().sum())(x)),
    "checkpoint": ("r3,4", lambda x: torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False)),
    "nested tensor": ("r2,3 r1,3", lambda x, y: torch.nested.as_nested_tensor([x, y]).sin().to_padded_tensor(0.0)),
    "sparse.mm": ("r3,3 r3,2", lambda x, y: torch.sparse.mm(x.to_sparse(), y)),
}
