"""Operators that lack a derivative, or have a wrong one, by operators that have it.

Each function takes what its operator takes, and returns the same to rounding. `FORWARD` is for tangents of gradients,
`TWICE` for double backward. Operators of a loss are found in these tables by what a TorchFunctionMode sees.

Torch's derivatives of linear systems and determinants use factors that were saved. In forward mode they are constants
there, and the tangents of gradients are wrong by as much as they are long; nothing says so. Here they go by LU factors.
"""

# ruff: noqa: N803, N806 (arguments have the names that torch gives them)

import inspect
import math
from collections.abc import Callable, Sequence
from functools import wraps
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._decomp import decompositions
from torch.nn import functional as F
from torch.nn._reduction import get_enum
from torch.nn.attention import SDPBackend, sdpa_kernel

from mlotool.core.errors import ConfigError
from mlotool.core.private import functorch as _functorch
from mlotool.core.private import (
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    temporarily_clear_interpreter_stack,
)

P = ParamSpec("P")
T = TypeVar("T")
Table = dict[Callable[..., Any], Callable[..., Any]]

_SHORT = (torch.float16, torch.bfloat16)
_MODES, _PADDINGS = ("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection")
# Above this, torch takes matrix products for Euclidean distances.
_MOST_ROWS = 25
_EMBEDDING_BAG = inspect.signature(F.embedding_bag)

# What torch says of an operator without forward mode.
_LACKING = "Trying to use forward AD with {} that does not support it"

_RANDOM = (
    "scaled_dot_product_attention: found dropout_p: {dropout} on a GPU; expected 0, since its kernel draws other "
    "random numbers there. Set dropout to 0 in attention, or call it under "
    "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)."
)


def _without_autocast(
    kinds: Sequence[str], cast: Callable[[Tensor, str], Tensor]
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Let a function compute without autocast, which is on, on tensors that are cast once."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def decorated(*args: P.args, **kwargs: P.kwargs) -> T:
            kind = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)).device.type
            if kind not in kinds or not torch.is_autocast_enabled(kind):
                return function(*args, **kwargs)

            def casted(value: Any) -> Any:
                return cast(value, kind) if isinstance(value, Tensor) else value

            with torch.autocast(kind, enabled=False):
                return function(*map(casted, args), **{name: casted(value) for name, value in kwargs.items()})

        return decorated

    return decorate


def _in_float32(*kinds: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Let a function compute as autocast has its operator compute on some kinds of devices: in float32."""
    return _without_autocast(kinds, lambda value, _: value.float() if value.dtype in _SHORT else value)


def _to_autocast_dtype(value: Tensor, kind: str) -> Tensor:
    # Not of float64, nor of tensors on another device: autocast does not either.
    is_cast = value.dtype in (torch.float32, *_SHORT) and value.device.type == kind
    return value.to(torch.get_autocast_dtype(kind)) if is_cast else value


def _in_place(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that puts the same in the place of its first argument."""

    def changed(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Put the same in the place of x."""
        return x.copy_(function(x.clone(), *args, **kwargs))

    return changed


def _is_batched(tensor: Tensor) -> bool:
    """Return whether the tensor is one of tasks: Python cannot read its values, and torch.func draws its dropout.

    `is_batchedtensor` alone does not see it where a gradient or a tangent is taken within the tasks.
    """
    while is_functorch_wrapped_tensor(tensor):
        if is_batchedtensor(tensor):
            return True
        tensor = get_unwrapped(tensor)
    return False


def _activation(function: Callable[[Tensor], Tensor], x: Tensor, inplace: bool) -> Tensor:
    # The kernels of torch compute in float32 where the numbers are shorter.
    is_short = x.dtype in _SHORT
    point = x.clone() if inplace and not is_short else x
    result = function(point.float()).to(x.dtype) if is_short else function(point)
    return x.copy_(result) if inplace else result


def silu(x: Tensor, inplace: bool = False) -> Tensor:
    """Return `x sigmoid(x)`."""
    return _activation(lambda x: x * torch.sigmoid(x), x, inplace)


def mish(x: Tensor, inplace: bool = False) -> Tensor:
    """Return `x tanh(log(1 + exp(x)))`."""
    return _activation(lambda x: x * torch.tanh(F.softplus(x)), x, inplace)


def hardsigmoid(x: Tensor, inplace: bool = False) -> Tensor:
    """Return `x / 6 + 1/2`, kept between 0 and 1."""
    return _activation(lambda x: F.hardtanh(x + 3.0, 0.0, 6.0) / 6.0, x, inplace)


def logit(x: Tensor, eps: float | None = None) -> Tensor:
    """Return `log(z / (1 - z))`, with z = x kept `eps` away from 0 and 1."""
    z = x if eps is None else x.clamp(eps, 1.0 - eps)
    return torch.log(z / (1.0 - z))


@_in_float32("cuda")
def prod(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return the product; of all entries by one axis, since torch has no tangent of that gradient at two zeros."""
    return torch.prod(x, *args, **kwargs) if args or "dim" in kwargs else torch.prod(x.reshape(-1), 0, **kwargs)


@_in_float32("cuda")
def cumprod(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return the products of the first 1, 2, ... entries.

    By doubling: product over the last 2, 4, 8, ... entries. Torch's derivative takes the products without an entry that
    is zero for constants in forward mode.
    """
    if not (x.is_floating_point() or x.is_complex()):
        return torch.cumprod(x, dim, dtype=dtype)
    products = (x if dtype is None else x.to(dtype)).movedim(dim, 0) if x.dim() else x.reshape(1)
    reach = 1
    while reach < len(products):
        products = torch.cat([products[:reach], products[reach:] * products[:-reach]])
        reach *= 2
    return products.movedim(0, dim) if x.dim() else products.reshape(())


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Return `input` times a random mask of zeros and `1 / (1 - p)`.

    Within `torch.func` torch draws the mask as for a contiguous tensor, and elsewhere in the order of memory: of a
    transposed tensor other entries are dropped. On a GPU it takes an operator there that has no tangents.
    """
    is_random = training and 0.0 < p < 1.0 and input.numel() > 0
    if not is_random or _is_batched(input) or input.device.type not in ("cpu", "cuda"):
        return F.dropout(input, p, training, inplace)
    if input.is_cuda:
        # The kernel of a training step, whose mask is drawn with the strides of the tensor.
        mask = torch.native_dropout(torch.ones_like(input), p, True)[1].to(input.dtype) / (1.0 - p)
    else:
        mask = torch.empty_like(input).bernoulli_(1.0 - p).div_(1.0 - p)
    return input.mul_(mask) if inplace else input * mask


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """Return `(x - mean) / sqrt(var + eps)` by group of channels, then times a weight and plus a bias by channel."""
    # Layer normalization of one row a group.
    rows = input.reshape(input.shape[0], num_groups, math.prod(input.shape[1:]) // num_groups)
    result = F.layer_norm(rows, rows.shape[2:], eps=eps).reshape(input.shape)
    channels = (1, -1, *[1] * (input.dim() - 2))
    if weight is not None:
        result = result * weight.view(channels)
    return result if bias is None else result + bias.view(channels)


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """Return `g v / |v|`, with a norm an index of `dim`; one norm where that is -1."""
    if dim == -1:
        return v * (g / torch.linalg.vector_norm(v))
    others = [axis for axis in range(v.dim()) if axis != dim]
    return v * (g / torch.linalg.vector_norm(v, dim=others, keepdim=True))


# Autocast casts the arguments of attention once. torch.func takes it apart, and lets autocast see the parts.
@_without_autocast(("cpu", "cuda"), _to_autocast_dtype)
def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return `dropout(softmax(Q K^T / sqrt(d) + mask)) V` by torch's operators for products and softmax.

    Raises:
        ConfigError: dropout would draw other random numbers than in a training step.
    """
    dropout = args[1] if len(args) > 1 else kwargs.get("dropout_p", 0.0)
    cuda = torch.backends.cuda
    is_fused = cuda.flash_sdp_enabled() or cuda.mem_efficient_sdp_enabled() or cuda.cudnn_sdp_enabled()
    if dropout > 0.0 and query.is_cuda and is_fused:
        raise ConfigError(_RANDOM.format(dropout=dropout))
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(query, key, value, *args, **kwargs)


def data(x: Tensor, *_: Any) -> Tensor:
    """Return `x.data`: torch leaves the tangent that is inside of a tensor of torch.func, and refuses `torch.vmap`."""
    return x.detach()


def detach_in_place(x: Tensor) -> Tensor:
    """Detach a tensor of a transform of torch.func, and what is inside of it: torch leaves the tangent of that."""
    inside = x.detach_()
    while is_functorch_wrapped_tensor(inside):
        inside = get_unwrapped(inside)
        with temporarily_clear_interpreter_stack():
            inside.detach_()
    return x


def _outside(x: Tensor, read: Callable[[Tensor], Any]) -> Any:
    """Return what is read of a tensor outside of the transforms of gradients that it is within."""
    while _functorch.is_gradtrackingtensor(x):
        x = get_unwrapped(x)
    with temporarily_clear_interpreter_stack():
        return read(x.detach())


def numpy(x: Tensor, **kwargs: Any) -> Any:
    """Return `x.numpy()`, which torch refuses within `torch.func.vjp`; not within `torch.vmap`."""
    return _outside(x, lambda x: x.numpy(**kwargs))


def to_list(x: Tensor) -> Any:
    """Return `x.tolist()`, which torch 2.9 refuses within `torch.func.vjp`."""
    return _outside(x, Tensor.tolist)


def array(x: Tensor, dtype: Any = None, copy: bool | None = None) -> Any:
    """Return `numpy.asarray(x)`, likewise."""
    values = numpy(x)
    return values if dtype is None else values.astype(dtype, copy=bool(copy))


def _how(size_average: bool | None = None, reduce: bool | None = None, reduction: str = "mean") -> str:
    # The first two are arguments that torch still takes.
    if size_average is None and reduce is None:
        return reduction
    return "none" if reduce is False else "sum" if size_average is False else "mean"


def _reduced(values: Tensor, how: str, weight: Tensor | None = None) -> Tensor:
    """Return values reduced; of weighted ones the mean is over the sum of the weights."""
    whole = values if weight is None else weight * values
    if how == "mean" and weight is not None:
        return whole.sum() / weight.expand_as(whole).sum()
    return whole if how == "none" else whole.mean() if how == "mean" else whole.sum()


@_in_float32("cpu", "cuda")
def mse_loss(input: Tensor, target: Tensor, *how: Any, weight: Tensor | None = None, **named: Any) -> Tensor:
    """Return the mean of `w (x - y)^2`, over the sum of the weights where there are some."""
    weight = how[3] if len(how) > 3 else weight
    return _reduced((input - target).square(), _how(*how[:3], **named), weight)


@_in_float32("cpu", "cuda")
def huber_loss(
    input: Tensor, target: Tensor, reduction: str = "mean", delta: float = 1.0, weight: Tensor | None = None
) -> Tensor:
    """Return the mean of `z^2 / 2` where `z = |x - y|` is at most delta, of `delta (z - delta / 2)` elsewhere."""
    difference = input - target
    # Where a branch is not taken, its derivative must be a number.
    size = difference.abs()
    losses = torch.where(size <= delta, 0.5 * difference.square(), delta * (size - 0.5 * delta))
    return _reduced(losses, reduction, weight)


@_in_float32("cpu", "cuda")
def soft_margin_loss(input: Tensor, target: Tensor, *how: Any, **named: Any) -> Tensor:
    """Return the mean of `log(1 + exp(-y x))`."""
    return _reduced(-F.logsigmoid(target * input), _how(*how, **named))


@_in_float32("cpu", "cuda")
def multi_margin_loss(
    input: Tensor,
    target: Tensor,
    p: int = 1,
    margin: float = 1.0,
    weight: Tensor | None = None,
    *how: Any,
    **named: Any,
) -> Tensor:
    """Return the mean over samples of `sum over j != y of w_y max(0, margin - x_y + x_j)^p / C`."""
    return decompositions.multi_margin_loss(input, target, p, margin, weight, get_enum(_how(*how, **named)))


@_in_float32("cpu", "cuda")
def multilabel_margin_loss(input: Tensor, target: Tensor, *how: Any, **named: Any) -> Tensor:
    """Return the mean over samples of `sum over labels y, j no label, of max(0, 1 - x_y + x_j) / C`."""
    return decompositions.multilabel_margin_loss_forward(input, target, get_enum(_how(*how, **named)))[0]


def linear_cross_entropy(*args: Tensor, options: object = None, **kwargs: Any) -> Tensor:
    """Return the cross entropy of `x W^T + b` whole: the parts that options cut it into have gradients alone."""
    return F.linear_cross_entropy(*args, **kwargs)


def embedding(input: Tensor, weight: Tensor, padding_idx: int | None = None, *args: Any, **kwargs: Any) -> Tensor:
    """Return the rows of `weight`; that at `padding_idx` has no tangent, as it has no gradient."""
    rows = F.embedding(input, weight, padding_idx, *args, **kwargs)
    if padding_idx is None:
        return rows
    return torch.where((input == padding_idx % len(weight)).unsqueeze(-1), rows.detach(), rows)


def embedding_by_name(weight: Tensor, indices: Tensor, padding_idx: int = -1, *args: Any, **kwargs: Any) -> Tensor:
    """Return the same; a negative `padding_idx` is none."""
    rows = torch.embedding(weight, indices, padding_idx, *args, **kwargs)
    return rows if padding_idx < 0 else torch.where((indices == padding_idx).unsqueeze(-1), rows.detach(), rows)


def embedding_bag(*args: Any, **kwargs: Any) -> Tensor:
    """Return the sum, mean or maximum of the rows of each bag; zeros of an empty one."""
    bound = _EMBEDDING_BAG.bind(*args, **kwargs)
    bound.apply_defaults()
    given = SimpleNamespace(**bound.arguments)
    if given.max_norm is not None or given.scale_grad_by_freq or given.sparse:
        operator = "_embedding_bag with max_norm, scale_grad_by_freq or sparse"
        raise NotImplementedError(f"the derivative for '{operator}' is not implemented")
    input, weight, offsets, padding = given.input, given.weight, given.offsets, given.padding_idx
    indices, device = input.reshape(-1), input.device
    if offsets is None:
        bags, count = torch.arange(len(input), device=device).repeat_interleave(input.shape[1]), len(input)
    else:
        starts = offsets[:-1] if given.include_last_offset else offsets
        bags = torch.bucketize(torch.arange(len(indices), device=device), starts, right=True) - 1
        count = len(starts)
    if not len(indices):
        return weight[:0].sum(0).expand(count, -1)
    rows = F.embedding(indices, weight, padding)
    is_counted = torch.ones_like(bags, dtype=torch.bool) if padding is None else indices != padding % len(weight)
    if given.mode == "max":
        # The largest entry of each column among the rows of a bag; the first one where several are.
        belongs = (bags == torch.arange(count, device=device)[:, None]) & is_counted
        known = torch.where(belongs[:, :, None], rows.detach(), -torch.inf)
        return torch.where(belongs.any(1)[:, None], rows.gather(0, known.argmax(1)), 0.0)
    if given.per_sample_weights is not None:
        rows = rows * given.per_sample_weights.reshape(-1, 1)
    sums = torch.zeros(count, rows.shape[1], dtype=rows.dtype, device=device)
    sums = sums.index_add(0, bags, rows * is_counted[:, None])
    if given.mode == "sum":
        return sums
    sizes = torch.zeros(count, dtype=torch.long, device=device).index_add(0, bags, is_counted.long())
    return sums / sizes.clamp_min(1)[:, None]


@_in_float32("cpu", "cuda")
def cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str = "use_mm_for_euclid_dist_if_necessary") -> Tensor:
    """Return `|x_i - y_j|_p`.

    Args:
        x1: (..., P, M).
        x2: (..., R, M).
        p: of the norm.
        compute_mode: as torch takes it. With matrix products the memory is P R; else P R M.
    """
    many = max(x1.shape[-2], x2.shape[-2]) > _MOST_ROWS
    if p == 2.0 and (compute_mode == "use_mm_for_euclid_dist" or (many and compute_mode.endswith("necessary"))):
        squares = x1.square().sum(-1)[..., :, None] + x2.square().sum(-1)[..., None, :]
        return _power(squares - 2.0 * (x1 @ x2.mT), 0.5)
    return _norm(x1[..., :, None, :] - x2[..., None, :, :], p)


@_in_float32("cpu", "cuda")
def pdist(input: Tensor, p: float = 2.0) -> Tensor:
    """Return `|x_i - x_j|_p` for i < j."""
    first, second = torch.triu_indices(len(input), len(input), 1, device=input.device)
    return _norm(input[first] - input[second], p)


def _norm(difference: Tensor, p: float) -> Tensor:
    """Return norms along the last axis, of derivative zero at zero."""
    if p == 2.0:
        return _power(difference.square().sum(-1), 0.5)
    if p == float("inf"):
        if difference.shape[-1] == 0:
            return difference.sum(-1)
        # Where several are the largest, each has the whole slope, as torch has it.
        sizes = difference.abs()
        largest = sizes.detach().amax(-1, keepdim=True)
        return torch.where(sizes == largest, sizes - largest, 0.0).sum(-1) + largest.squeeze(-1)
    if p < 2.0 and p not in (0.0, 1.0):
        return _power(_power(difference.abs(), p).sum(-1), 1.0 / p)
    return torch.linalg.vector_norm(difference, p, dim=-1)


def _power(sizes: Tensor, p: float) -> Tensor:
    """Return `sizes^p`, of derivative zero at zero: zero times an infinite slope would be NaN."""
    is_positive = sizes > 0
    return torch.where(is_positive, torch.where(is_positive, sizes, 1.0) ** p, 0.0)


def scatter_reduce(
    input: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """Return what torch returns, but of products, of which torch's tangent of the gradient is wrong."""
    if reduce == "prod":
        raise NotImplementedError(_LACKING.format("scatter_reduce of products"))
    return torch.scatter_reduce(input, dim, index, src, reduce, include_self=include_self)


def masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """Return x with the first values of `source` where the mask is true."""
    x, mask = torch.broadcast_tensors(x, mask)
    if source.numel() < x.numel() and not _is_batched(mask) and int(mask.sum()) > source.numel():
        raise RuntimeError(f"masked_scatter: found {source.numel()} values for {int(mask.sum())} places of the mask")
    if source.numel() == 0:
        return x.clone()
    place = (mask.reshape(-1).cumsum(0) - 1).clamp(0, source.numel() - 1)
    return torch.where(mask, source.reshape(-1)[place].view(x.shape), x)


@_in_float32("cpu", "cuda")
def grid_sample(
    input: Tensor, grid: Tensor, mode: str = "bilinear", padding_mode: str = "zeros", align_corners: bool | None = None
) -> Tensor:
    """Return pictures at the points of a grid, by the weights of the pixels around each."""
    if input.dim() != 4:
        raise NotImplementedError(_LACKING.format("grid_sampler_3d"))
    pair = (input.float(), grid.float()) if input.dtype in _SHORT else (input, grid)
    how = _MODES.index(mode), _PADDINGS.index(padding_mode), bool(align_corners)
    return decompositions.grid_sampler_2d(*pair, *how).to(input.dtype)


def grid_sample_twice(input: Tensor, grid: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return the same for double backward, which volumes do not have in older versions of torch."""
    return (grid_sample if input.dim() == 4 else F.grid_sample)(input, grid, *args, **kwargs)


@_in_float32("cpu", "cuda")
def solve(A: Tensor, B: Tensor, *, left: bool = True) -> Tensor:
    """Return `A^-1 B = U^-1 L^-1 P^T B`, or `B A^-1`."""
    # As torch does: B is a batch of vectors where its shape is that of A without the last axis.
    is_vector = B.dim() == 1 or (A.dim() - 1 == B.dim() and B.shape == A.shape[:-1])
    if not left and not is_vector:
        return solve(A.mT, B.mT).mT
    P, L, U = torch.linalg.lu(A)
    right = P.mT @ (B.unsqueeze(-1) if is_vector else B)
    half = torch.linalg.solve_triangular(L, right, upper=False, unitriangular=True)
    solution = torch.linalg.solve_triangular(U, half, upper=True)
    return solution.squeeze(-1) if is_vector else solution


@_in_float32("cpu", "cuda")
def solve_ex(A: Tensor, B: Tensor, *, left: bool = True, check_errors: bool = False) -> Any:
    """Return the same, and zeros: that nothing has gone wrong."""
    zeros = torch.zeros(A.shape[:-2], dtype=torch.int32, device=A.device)
    return torch.return_types.linalg_solve_ex((solve(A, B, left=left), zeros))  # type: ignore[attr-defined]


@_in_float32("cpu", "cuda")
def tensorsolve(A: Tensor, B: Tensor, dims: Sequence[int] | None = None) -> Tensor:
    """Return X with `tensordot(A, X) = B`."""
    moved = A if dims is None else A.movedim(tuple(dims), tuple(range(A.dim() - len(dims), A.dim())))
    shape = moved.shape[B.dim() :]
    return solve(moved.reshape(B.numel(), math.prod(shape)), B.reshape(-1)).reshape(shape)


@_in_float32("cpu", "cuda")
def det(A: Tensor) -> Tensor:
    """Return `sign(P) prod U_ii`."""
    P, _, U = torch.linalg.lu(A)
    return _parity(P) * U.diagonal(dim1=-2, dim2=-1).prod(-1)


@_in_float32("cpu", "cuda")
def slogdet(A: Tensor) -> Any:
    """Return the sign of the determinant, and `sum log |U_ii|`."""
    P, _, U = torch.linalg.lu(A)
    diagonal = U.diagonal(dim1=-2, dim2=-1)
    parts = _parity(P) * diagonal.sgn().prod(-1), diagonal.abs().log().sum(-1)
    return torch.return_types.linalg_slogdet(parts)  # type: ignore[attr-defined]


@_in_float32("cpu", "cuda")
def logdet(A: Tensor) -> Tensor:
    """Return `log det A`; NaN where that is negative."""
    sign, size = slogdet(A)
    return torch.where(sign.detach().real > 0, size, size + (sign.detach().real).sqrt().log())


@_in_float32("cpu", "cuda")
def cholesky_inverse(L: Tensor, upper: bool = False) -> Tensor:
    """Return `(L L^H)^-1`, or `(L^H L)^-1`."""
    one = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)
    triangle = L.triu() if upper else L.tril()
    inverse = torch.linalg.solve_triangular(triangle, one.expand_as(L), upper=upper)
    return inverse @ inverse.mH if upper else inverse.mH @ inverse


@_in_float32("cpu", "cuda")
def triangular_solve(
    b: Tensor, A: Tensor, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> Any:
    """Return `A^-1 b`, or `A^-T b`, and a copy of A."""
    matrix, is_upper = (A.mT, not upper) if transpose else (A, upper)
    solution = torch.linalg.solve_triangular(matrix, b, upper=is_upper, unitriangular=unitriangular)
    return torch.return_types.triangular_solve((solution, A.clone()))


def _parity(P: Tensor) -> Tensor:
    """Return the determinant of a permutation matrix: 1 for an even number of inversions, -1 for an odd one."""
    order = P.detach().real.argmax(-1)
    later = torch.ones(P.shape[-2:], dtype=torch.bool, device=P.device).triu(1)
    inversions = ((order[..., :, None] > order[..., None, :]) & later).sum((-2, -1))
    return (1 - 2 * (inversions % 2)).to(P.dtype)


def _table(**functions: Callable[..., Any]) -> Table:
    """Return a table from operators, of torch and of its tensors, whose names these are."""
    homes = (torch, torch.linalg, torch.special, Tensor)
    return {getattr(home, name): other for name, other in functions.items() for home in homes if hasattr(home, name)}


# What fails in double backward, or is silently wrong (weight normalization, linear_cross_entropy).
TWICE: Table = {
    F.scaled_dot_product_attention: scaled_dot_product_attention,
    torch._weight_norm: weight_norm,
    F.hardsigmoid: hardsigmoid,
    F.multi_margin_loss: multi_margin_loss,
    F.multilabel_margin_loss: multilabel_margin_loss,
    F.embedding_bag: embedding_bag,
}

# Since torch 2.15.
if hasattr(F, "linear_cross_entropy"):
    TWICE[F.linear_cross_entropy] = linear_cross_entropy

# Nodes of operators that this torch differentiates once and a newer one twice; `TWICE` has the operators.
ONCE_IN_OLDER_TORCH: tuple[str, ...] = ()

# 2.9 lacks them, 2.15 has them; in between they do no harm.
if torch.__version__ < "2.15":
    ONCE_IN_OLDER_TORCH = ("Cdist", "Pdist", "GridSampler2D")
    TWICE |= _table(cdist=cdist, pdist=pdist)
    TWICE[F.pdist], TWICE[F.grid_sample] = pdist, grid_sample_twice

# Those of `TWICE`, what lacks forward mode, and what is silently wrong in it (linear systems, products of zeros).
FORWARD: Table = {
    **TWICE,
    F.embedding: embedding,
    F.dropout: dropout,
    F.silu: silu,
    F.mish: mish,
    F.group_norm: group_norm,
    F.mse_loss: mse_loss,
    F.huber_loss: huber_loss,
    F.soft_margin_loss: soft_margin_loss,
    F.pdist: pdist,
    F.grid_sample: grid_sample,
    Tensor.data.__get__: data,  # type: ignore[attr-defined]
    Tensor.numpy: numpy,
    Tensor.__array__: array,
    Tensor.tolist: to_list,
    torch.dropout: lambda input, p, train: dropout(input, p, train),
    torch.dropout_: lambda input, p, train: dropout(input, p, train, True),
    torch.linalg.solve: solve,
    **_table(
        embedding=embedding_by_name,
        logit=logit,
        logit_=_in_place(logit),
        group_norm=group_norm,
        cdist=cdist,
        pdist=pdist,
        masked_scatter=masked_scatter,
        masked_scatter_=_in_place(masked_scatter),
        scatter_reduce=scatter_reduce,
        scatter_reduce_=_in_place(scatter_reduce),
        prod=prod,
        cumprod=cumprod,
        detach_=detach_in_place,
        solve_ex=solve_ex,
        tensorsolve=tensorsolve,
        det=det,
        slogdet=slogdet,
        logdet=logdet,
        cholesky_inverse=cholesky_inverse,
        triangular_solve=triangular_solve,
    ),
}
