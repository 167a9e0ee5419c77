"""Second derivatives of losses that were written for gradients alone: forward over reverse mode, and double backward.

Three things in such a loss would otherwise fail, or go wrong without a word: operators without a derivative in forward
mode, or with one derivative alone; `torch.no_grad()` and `.data`, which stop gradients and let tangents pass; and what
cannot be had at all, of which torch says so in words of its own, or takes what a backward returns for a constant.

Operators that losses often have are replaced by equal ones; others are refused, and `product: auto` takes reverse then.
Torch's derivatives of linear systems and determinants use factors that were saved, which are constants in forward mode:
here they go by inverses and by the factors of `torch.linalg.lu`.
"""

# ruff: noqa: N803, N806 (arguments have the names that torch gives them)

import inspect
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial, wraps
from types import FrameType, FunctionType, SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._decomp import decompositions
from torch.autograd import grad_mode
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from mlotool.core import private
from mlotool.core.errors import ConfigError
from mlotool.core.rematerialization import computed_as_one, graph_inside
from mlotool.core.replay import LossTraits, RandomState

Operator = Callable[..., Any]
Table = dict[Operator, Operator]

_SHORT = (torch.float16, torch.bfloat16)
_EMBEDDING_BAG = inspect.signature(F.embedding_bag)

# What torch says of an operator without forward mode, and of one that it differentiates once.
_LACKING = "Trying to use forward AD with {} that does not support it"

_RANDOM = (
    "scaled_dot_product_attention: found dropout_p: {dropout} on a GPU; expected 0, since its kernel draws other "
    "random numbers there. Set dropout to 0, or call it under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)."
)


def _cast_once(cast: Callable[[Tensor, str], Tensor]) -> Callable[[Operator], Operator]:
    """Let a function compute without autocast, which is on, on tensors that are cast once."""

    def decorate(function: Operator) -> Operator:
        @wraps(function)
        def decorated(*args: Any, **kwargs: Any) -> Tensor:
            kind = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)).device.type
            if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
                return function(*args, **kwargs)

            def casted(value: Any) -> Any:
                return cast(value, kind) if isinstance(value, Tensor) else value

            with torch.autocast(kind, enabled=False):
                return function(*map(casted, args), **{name: casted(value) for name, value in kwargs.items()})

        return decorated

    return decorate


def _in_float32(value: Tensor, _: str) -> Tensor:
    return value.float() if value.dtype in _SHORT else value


def _in_autocast_dtype(value: Tensor, kind: str) -> Tensor:
    # Not of float64, nor of tensors on another device: autocast does not either.
    is_cast = value.dtype in (torch.float32, *_SHORT) and value.device.type == kind
    return value.to(torch.get_autocast_dtype(kind)) if is_cast else value


def _is_batched(tensor: Tensor) -> bool:
    """Return whether the tensor is one of tasks, for which torch.func draws its dropout.

    `is_batchedtensor` alone does not see it where a gradient or a tangent is taken within the tasks.
    """
    while private.is_functorch_wrapped_tensor(tensor):
        if private.is_batchedtensor(tensor):
            return True
        tensor = private.get_unwrapped(tensor)
    return False


def _activation(function: Callable[[Tensor], Tensor]) -> Operator:
    """Return an activation as torch has it, in place or not; its kernels compute in float32 what is shorter."""

    def activation(x: Tensor, inplace: bool = False) -> Tensor:
        is_short = x.dtype in _SHORT
        point = x.clone() if inplace and not is_short else x
        result = function(point.float()).to(x.dtype) if is_short else function(point)
        return x.copy_(result) if inplace else result

    return activation


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
    input: Tensor, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> Tensor:
    """Return `(x - mean) / sqrt(var + eps)` by group of channels, then times a weight and plus a bias by channel."""
    # Layer normalization of one row per group.
    rows = input.reshape(input.shape[0], num_groups, math.prod(input.shape[1:]) // num_groups)
    result = F.layer_norm(rows, rows.shape[2:], eps=eps).reshape(input.shape)
    channels = (1, -1, *[1] * (input.dim() - 2))
    if weight is not None:
        result = result * weight.view(channels)
    return result if bias is None else result + bias.view(channels)


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """Return `g v / |v|`, with a norm an index of `dim`; one norm where that is -1."""
    others = [axis for axis in range(v.dim()) if axis != dim or dim == -1]
    return v * (g / torch.linalg.vector_norm(v, dim=others, keepdim=dim != -1))


# Autocast casts the arguments of attention once. torch.func takes it apart, and lets autocast see the parts.
@_cast_once(_in_autocast_dtype)
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


def detach_in_place(x: Tensor) -> Tensor:
    """Detach a tensor of a transform of torch.func, and what is inside of it: torch leaves the tangent of that."""
    inside = x.detach_()
    while private.is_functorch_wrapped_tensor(inside):
        inside = private.get_unwrapped(inside)
        with private.temporarily_clear_interpreter_stack():
            inside.detach_()
    return x


def _how(size_average: bool | None = None, reduce: bool | None = None, reduction: str = "mean") -> str:
    # The first two are arguments that torch still takes.
    if size_average is None and reduce is None:
        return reduction
    return "none" if reduce is False else "sum" if size_average is False else "mean"


def _reduced(values: Tensor, reduction: str, weight: Tensor | None) -> Tensor:
    """Return values reduced; of weighted ones the mean is over the sum of the weights."""
    values = values if weight is None else weight * values
    if reduction != "mean":
        return values.sum() if reduction == "sum" else values
    return values.mean() if weight is None else values.sum() / weight.expand_as(values).sum()


@_cast_once(_in_float32)
def mse_loss(input: Tensor, target: Tensor, *how: Any, weight: Tensor | None = None, **named: Any) -> Tensor:
    """Return the mean of `w (x - y)^2`, over the sum of the weights where there are some."""
    weight = how[3] if len(how) > 3 else weight
    return _reduced((input - target).square(), _how(*how[:3], **named), weight)


@_cast_once(_in_float32)
def huber_loss(
    input: Tensor, target: Tensor, reduction: str = "mean", delta: float = 1.0, weight: Tensor | None = None
) -> Tensor:
    """Return the mean of `z^2 / 2` where `z = |x - y|` is at most delta, of `delta (z - delta / 2)` elsewhere."""
    difference = input - target
    # Where a branch is not taken, its derivative must be a number.
    size = difference.abs()
    losses = torch.where(size <= delta, 0.5 * difference.square(), delta * (size - 0.5 * delta))
    return _reduced(losses, reduction, weight)


def embedding(input: Tensor, weight: Tensor, padding_idx: int | None = None, *args: Any, **kwargs: Any) -> Tensor:
    """Return the rows of `weight`; that at `padding_idx` has no tangent, as it has no gradient."""
    rows = F.embedding(input, weight, padding_idx, *args, **kwargs)
    if padding_idx is None:
        return rows
    return torch.where((input == padding_idx % len(weight)).unsqueeze(-1), rows.detach(), rows)


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


def prod(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return the product; of all entries by one axis, since torch has no tangent of that gradient at two zeros."""
    return torch.prod(x, *args, **kwargs) if args or "dim" in kwargs else torch.prod(x.reshape(-1), 0, **kwargs)


def cumprod(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return the products of the first 1, 2, ... entries, of the last 2, 4, 8, ... at a time."""
    if not (x.is_floating_point() or x.is_complex()) or x.dim() == 0:
        return torch.cumprod(x, dim, dtype=dtype)
    products, reach = x.to(dtype or x.dtype).movedim(dim, 0), 1
    while reach < len(products):
        products = torch.cat([products[:reach], products[reach:] * products[:-reach]])
        reach *= 2
    return products.movedim(0, dim)


def scatter_reduce(x: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, **kwargs: Any) -> Tensor:
    """Return what torch does, but for products, of which its tangent of the gradient is wrong."""
    if reduce == "prod":
        raise NotImplementedError(_LACKING.format("scatter_reduce of products"))
    return torch.scatter_reduce(x, dim, index, src, reduce, **kwargs)


def masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """Return x with the first values of `source` where the mask is true."""
    x, mask = torch.broadcast_tensors(x, mask)
    if not source.numel():
        return x.clone()
    return torch.where(mask, source.reshape(-1)[mask.reshape(-1).cumsum(0) - 1].view(x.shape), x)


def logit(x: Tensor, eps: float | None = None) -> Tensor:
    """Return `log(z / (1 - z))`, with z = x kept `eps` away from 0 and 1."""
    z = x if eps is None else x.clamp(eps, 1.0 - eps)
    return torch.log(z / (1.0 - z))


@_cast_once(_in_float32)
def soft_margin_loss(input: Tensor, target: Tensor, *how: Any, **named: Any) -> Tensor:
    """Return the mean of `log(1 + exp(-y x))`."""
    return _reduced(-F.logsigmoid(target * input), _how(*how, **named), None)


@_cast_once(_in_float32)
def multi_margin_loss(input: Tensor, target: Tensor, p: int = 1, margin: float = 1, *how: Any, **named: Any) -> Tensor:
    """Return the mean over samples of `sum over j != y of w_y max(0, margin - x_y + x_j)^p / C`."""
    weight = how[0] if how else named.pop("weight", None)
    scores, labels = torch.atleast_2d(input), torch.atleast_1d(target)
    excess = (margin - scores.gather(1, labels[:, None]) + scores).clamp_min(0.0) ** p
    excess = excess if weight is None else excess * weight[labels][:, None]
    losses = (excess * (torch.arange(scores.shape[1], device=scores.device) != labels[:, None])).mean(1)
    return _reduced(losses if input.dim() > 1 else losses[0], _how(*how[1:], **named), None)


@_cast_once(_in_float32)
def multilabel_margin_loss(input: Tensor, target: Tensor, *how: Any, **named: Any) -> Tensor:
    """Return the mean of `sum over labels y (up to the first -1) and others j of max(0, 1 - x_y + x_j) / C`."""
    scores, labels = torch.atleast_2d(input), torch.atleast_2d(target)
    is_label, labels = (labels >= 0).cumprod(1).bool(), labels.clamp_min(0)
    is_other = torch.zeros_like(scores).scatter_add(1, labels, is_label.to(scores.dtype)) == 0
    margins = 1.0 - scores.gather(1, labels)[:, :, None] + scores[:, None, :]
    losses = (margins.clamp_min(0.0) * (is_label[:, :, None] & is_other[:, None, :])).sum((1, 2)) / scores.shape[1]
    return _reduced(losses if input.dim() > 1 else losses[0], _how(*how, **named), None)


def _power(sizes: Tensor, p: float) -> Tensor:
    """Return `sizes^p`, of derivative zero at zero, where a slope is infinite."""
    is_positive = sizes > 0
    return torch.where(is_positive, torch.where(is_positive, sizes, 1.0) ** p, 0.0)


def _norm(difference: Tensor, p: float) -> Tensor:
    if p == 0.0 or math.isinf(p):
        return torch.linalg.vector_norm(difference, p, dim=-1)
    powers = difference.square() if p == 2.0 else _power(difference.abs(), p)
    return _power(powers.sum(-1), 1.0 / p)


@_cast_once(_in_float32)
def cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str = "use_mm_for_euclid_dist_if_necessary") -> Tensor:
    """Return `|x_i - y_j|_p`; with as many rows as torch does it for (25), by a product of matrices."""
    is_large = max(x1.shape[-2], x2.shape[-2]) > 25 and compute_mode.endswith("necessary")
    if p == 2.0 and (is_large or compute_mode == "use_mm_for_euclid_dist"):
        squares = x1.square().sum(-1)[..., :, None] + x2.square().sum(-1)[..., None, :]
        return _power(squares - 2.0 * (x1 @ x2.mT), 0.5)
    return _norm(x1[..., :, None, :] - x2[..., None, :, :], p)


@_cast_once(_in_float32)
def pdist(input: Tensor, p: float = 2.0) -> Tensor:
    """Return `|x_i - x_j|_p` for i < j."""
    first, second = torch.triu_indices(len(input), len(input), 1, device=input.device)
    return _norm(input[first] - input[second], p)


@_cast_once(_in_float32)
def grid_sample(
    input: Tensor, grid: Tensor, mode: str = "bilinear", padding_mode: str = "zeros", align_corners: bool | None = None
) -> Tensor:
    """Return pictures at the points of a grid, by the weights of the pixels around each; volumes are refused."""
    if input.dim() != 4:
        raise NotImplementedError(_LACKING.format("grid_sampler_3d"))
    how = ("bilinear", "nearest", "bicubic").index(mode), ("zeros", "border", "reflection").index(padding_mode)
    return decompositions.grid_sampler_2d(input, grid, *how, bool(align_corners))


@_cast_once(_in_float32)
def solve(A: Tensor, B: Tensor, *, left: bool = True) -> Tensor:
    """Return `A^-1 B`, or `B A^-1`; B is vectors where its shape is that of A without the last axis."""
    inverse, is_vector = torch.linalg.inv(A), B.dim() == 1 or B.shape == A.shape[:-1]
    if is_vector:
        return (inverse @ B.unsqueeze(-1)).squeeze(-1)
    return inverse @ B if left else B @ inverse


def solve_ex(A: Tensor, B: Tensor, *, left: bool = True, check_errors: bool = False) -> Any:
    """Return the same, and zeros: nothing has gone wrong."""
    zeros = torch.zeros(A.shape[:-2], dtype=torch.int32, device=A.device)
    return torch.return_types.linalg_solve_ex((solve(A, B, left=left), zeros))  # type: ignore[attr-defined]


def tensorsolve(A: Tensor, B: Tensor, dims: Sequence[int] | None = None) -> Tensor:
    """Return X with `tensordot(A, X) = B`."""
    moved = A if dims is None else A.movedim(tuple(dims), tuple(range(A.dim() - len(dims), A.dim())))
    shape = moved.shape[B.dim() :]
    return solve(moved.reshape(B.numel(), math.prod(shape)), B.reshape(-1)).reshape(shape)


@_cast_once(_in_float32)
def slogdet(A: Tensor) -> Any:
    """Return the sign of the determinant, and `sum log |U_ii|`."""
    P, _, U = torch.linalg.lu(A)
    diagonal = U.diagonal(dim1=-2, dim2=-1)
    parts = torch.linalg.det(P) * diagonal.sgn().prod(-1), diagonal.abs().log().sum(-1)
    return torch.return_types.linalg_slogdet(parts)  # type: ignore[attr-defined]


@_cast_once(_in_float32)
def det(A: Tensor) -> Tensor:
    """Return `det(P) prod U_ii`."""
    P, _, U = torch.linalg.lu(A)
    return torch.linalg.det(P) * U.diagonal(dim1=-2, dim2=-1).prod(-1)


def logdet(A: Tensor) -> Tensor:
    """Return `log det A`; NaN where that is negative."""
    sign, size = slogdet(A)
    return size + sign.detach().log()


@_cast_once(_in_float32)
def cholesky_inverse(L: Tensor, upper: bool = False) -> Tensor:
    """Return `(L L^H)^-1`, or `(L^H L)^-1`."""
    triangle = L.triu() if upper else L.tril()
    return torch.linalg.inv(triangle.mH @ triangle if upper else triangle @ triangle.mH)


@_cast_once(_in_float32)
def triangular_solve(b: Tensor, A: Tensor, upper: bool = True, transpose: bool = False, **kwargs: bool) -> Any:
    """Return `A^-1 b`, or `A^-T b`, and a copy of A."""
    matrix, is_upper = (A.mT, not upper) if transpose else (A, upper)
    solution = torch.linalg.solve_triangular(matrix, b, upper=is_upper, **kwargs)
    return torch.return_types.triangular_solve((solution, A.clone()))


def _table(*functions: Operator) -> Table:
    """Return a table from the operators, of torch and of its tensors, that have the names of functions."""
    homes = (torch, torch.linalg, torch.special, Tensor, F)
    return {getattr(home, x.__name__): x for x in functions for home in homes if hasattr(home, x.__name__)}


# What fails in double backward, or is silently wrong (weight normalization, linear_cross_entropy).
TWICE: Table = {
    F.scaled_dot_product_attention: scaled_dot_product_attention,
    torch._weight_norm: weight_norm,
    F.hardsigmoid: _activation(lambda x: F.hardtanh(x + 3.0, 0.0, 6.0) / 6.0),
    F.embedding_bag: embedding_bag,
    **_table(multi_margin_loss, multilabel_margin_loss),
}

# What torch differentiates twice since 2.14.
_OLDER = ("Cdist", "EuclideanDist", "Pdist", "GridSampler2D") if torch.__version__ < "2.14" else ()
if _OLDER:
    TWICE |= _table(cdist, pdist, grid_sample)

# Since torch 2.15; the parts that its options cut it into have gradients alone.
if hasattr(F, "linear_cross_entropy"):
    TWICE[F.linear_cross_entropy] = lambda *args, options=None, **kwargs: F.linear_cross_entropy(*args, **kwargs)

# Those of `TWICE`, what lacks forward mode, and what is silently wrong in it.
FORWARD: Table = {
    **TWICE,
    F.embedding: embedding,
    F.dropout: dropout,
    F.silu: _activation(lambda x: x * torch.sigmoid(x)),
    F.mish: _activation(lambda x: x * torch.tanh(F.softplus(x))),
    F.group_norm: group_norm,
    torch.group_norm: group_norm,
    F.mse_loss: mse_loss,
    F.huber_loss: huber_loss,
    # Torch leaves the tangent that is inside of a tensor of torch.func.
    Tensor.data.__get__: lambda x, *_: x.detach(),  # type: ignore[attr-defined]
    Tensor.detach_: detach_in_place,
    torch.dropout: dropout,
    Tensor.logit_: lambda x, eps=None: x.copy_(logit(x.clone(), eps)),
    Tensor.masked_scatter_: lambda x, *args: x.copy_(masked_scatter(x.clone(), *args)),
    Tensor.scatter_reduce_: lambda x, *args, **kwargs: x.copy_(scatter_reduce(x.clone(), *args, **kwargs)),
    **_table(prod, cumprod, masked_scatter, scatter_reduce, logit, soft_margin_loss, cdist, pdist, grid_sample),
    torch.linalg.solve: solve,
    **_table(solve_ex, tensorsolve, det, slogdet, logdet, cholesky_inverse, triangular_solve),
}

_SCRIPTED = (
    "problems.{problem}.loss: found '{name}', a module of torch.jit, which does not support forward mode, with "
    "product: forward; expected modules of Python. Leave out torch.jit.script or trace, or write product: reverse."
)

_ONCE = (
    "problems.{problem}.loss: found {name}, an autograd.Function whose backward is marked once_differentiable; "
    "expected functions that are differentiable twice. Write hypergradient: finite_difference, or remove the mark."
)

# Words of torch's where it cannot differentiate: in any way of taking a product, and in forward mode.
_ANYHOW = re.compile(r"derivative for .* is not implemented|torch\.utils\.checkpoint: ")
_FORWARD = re.compile(
    r"forward AD|forward gradient|forward mode AD|ZeroTensors|saved tensor hooks|setup_context|the jvp function"
    r"|functorch transform|Tensor\.requires_grad_\(\)|mutate a captured|Cannot access (?:data pointer|storage)"
)


@contextmanager
def explained(problem: str, product: str) -> Iterator[None]:
    """Say where torch cannot differentiate a loss: its own words, and what to write; other errors pass through.

    Args:
        problem: whose loss is evaluated or differentiated.
        product: that is computed: forward or reverse.

    Raises:
        ConfigError: torch cannot differentiate the loss in the way of that product.

    Example:
        >>> with explained("w", "reverse"):
        ...     pass
    """
    try:
        yield
    except RuntimeError as error:
        text = " ".join(str(error).split())
        is_forward = product == "forward" and _FORWARD.search(text)
        if not (is_forward or _ANYHOW.search(text)):
            raise
        remedy = f"{'product: reverse or ' if is_forward else ''}hypergradient: finite_difference"
        if "checkpoint" in text or "saved tensor hooks" in text:
            remedy = "mlotool.remat(block, x) in place of torch.utils.checkpoint"
        fault = f"problems.{problem}.loss: found what torch cannot differentiate ({text[:200]}), under product:"
        raise ConfigError(f"{fault} {product}; expected operators with two derivatives. Write {remedy}.") from error


def refuse_scripted(modules: Iterable[nn.Module], problem: str) -> None:
    """Refuse modules of TorchScript, whose outputs have no tangents in torch once they are optimized.

    Nothing says so when they are called, and a TorchFunctionMode does not see what they call.

    Args:
        modules: that a loss calls, with all that is in them.
        problem: whose loss it is.

    Raises:
        ConfigError: there is one.

    Example:
        >>> refuse_scripted([nn.Linear(1, 1)], "w")  # nothing to refuse
    """
    for module in modules:
        for name, value in module.named_modules():
            if isinstance(value, torch.jit.ScriptModule):
                raise ConfigError(_SCRIPTED.format(problem=problem, name=name or type(value).__name__))


# Modules whose switching of gradients says nothing about tangents.
_OWN = (
    "mlotool.core.",
    "mlotool.hypergradient.",
    "mlotool.problem.",
    "mlotool.program.",
    "torch._functorch.",
    # A backward that is marked once_differentiable: tangents pass it well.
    "torch.autograd.function",
)


# Functions of torch in Python that call operators of the tables, at once or in a backward pass.
_OPENED = frozenset({F.multi_head_attention_forward, torch.autograd.grad, torch.autograd.backward, Tensor.backward})


@contextmanager
def forward_mode(problem: str) -> Iterator[None]:
    """Evaluate a loss, and its backward pass, on tensors with tangents.

    Operators without forward mode are replaced by equal ones that have it. What is computed
    under `torch.no_grad()`, and what `.data` returns, has no tangent, as it has no gradient.

    Args:
        problem: whose loss it is.

    Raises:
        ConfigError: the loss has an operator, or a construction, that has no tangents here.

    Example:
        >>> from torch.autograd import forward_ad
        >>> from mlotool.core.tangents import dual_level
        >>> with dual_level(), forward_mode("w"):
        ...     x = forward_ad.make_dual(torch.zeros(1), torch.ones(1))
        ...     gradient = torch.func.vjp(lambda x: F.silu(x).sum(), x)[1](torch.ones(()), create_graph=False)[0]
        ...     forward_ad.unpack_dual(gradient).tangent
        tensor([0.5000])
    """
    before = torch._C._is_fwd_grad_enabled()
    try:
        with _evaluated(problem, "forward", _Decomposition(FORWARD, with_switches=True)):
            yield
    finally:
        torch._C._set_fwd_grad_enabled(before)


@contextmanager
def twice_differentiable_mode(problem: str) -> Iterator[None]:
    """Evaluate a loss whose gradient is differentiated by a second backward pass (reverse over reverse).

    Operators that fail there, or are silently wrong, are replaced by equal ones.

    Args:
        problem: whose loss it is.

    Raises:
        ConfigError: the loss has an operator that cannot be differentiated twice.

    Example:
        >>> x = torch.ones(2, 3, requires_grad=True)
        >>> with twice_differentiable_mode("w"):
        ...     loss = F.scaled_dot_product_attention(x, x, x).sum()
        ...     slope = torch.autograd.grad(loss, x, create_graph=True)[0]
        ...     bool(torch.autograd.grad(slope.square().sum(), x)[0].isfinite().all())
        True
    """
    with _evaluated(problem, "reverse", _Decomposition(TWICE)):
        yield


@contextmanager
def _evaluated(problem: str, product: str, mode: "_Decomposition") -> Iterator[None]:
    """Evaluate a loss with other operators, without what torch has for speed alone.

    Modules of attention take kernels for inference, which have no derivative, wherever no tensor seems to require a
    gradient, as within `torch.vmap`. A compiled function has no second derivatives, and takes the constants of its
    trace for the tangents of its inputs.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    # Dynamo takes long to import.
    stance = partial(torch.compiler.set_stance, "force_eager") if "torch._dynamo" in sys.modules else nullcontext
    try:
        with explained(problem, product), stance(), mode:
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


class _Decomposition(TorchFunctionMode):
    """Puts other operators in the place of some.

    Gradients are often off where tangents live: within a backward pass, and in custom functions. So what the end of
    `torch.no_grad` restores says nothing, and the context itself must be known: it is `self` in torch's frames. Its end
    restores what was there for tangents at its beginning.

    Args:
        table: from operators to these.
        with_switches: whether tangents are off too where gradients are switched off in a loss.
    """

    def __init__(self, table: Table, *, with_switches: bool = False) -> None:
        super().__init__()
        self._table, self._with_switches = table, with_switches
        self._before: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, or what stands in its place."""
        if func in _OPENED:
            with self:
                return _opened(func)(*args, **(kwargs or {}))
        if self._with_switches and func is private.set_grad_enabled:
            self._follow(sys._getframe(1), *args)
        if func not in self._table:
            return func(*args, **(kwargs or {}))
        return computed_as_one(self._table[func], *args, **(kwargs or {}))

    def _follow(self, frame: FrameType | None, is_on: bool) -> None:
        """Switch tangents as gradients are switched, in a frame that may be the `__torch_function__` of a mode."""
        while frame is not None and frame.f_code.co_name == "__torch_function__":
            # Below other modes; of two that follow switches the inner one has done it.
            if frame.f_globals.get("__name__") == "mlotool.core.forward_mode":
                return
            frame = frame.f_back
        context, is_end = None, False
        while frame is not None and frame.f_code.co_filename == grad_mode.__file__:
            context, is_end = frame.f_locals.get("self"), frame.f_code.co_name == "__exit__"
            frame = frame.f_back
        if frame is None or frame.f_globals.get("__name__", "").startswith(_OWN):
            return
        if not is_end:
            if context is not None:
                self._before.setdefault(context, torch._C._is_fwd_grad_enabled())
            torch._C._set_fwd_grad_enabled(is_on)
        elif context in self._before:
            torch._C._set_fwd_grad_enabled(self._before.pop(context))


@cache
def _opened(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of torch that does not ask modes to take its place, so that they see what it calls.

    Such a function calls the mode again when it is called under it, and for the mode's own call there is no mode.
    """
    assert isinstance(function, FunctionType)
    checks = [name for name in function.__globals__ if name.startswith("has_torch_function")]
    scope = {**function.__globals__, **dict.fromkeys(checks, lambda *_: False)}
    opened = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    opened.__kwdefaults__ = function.__kwdefaults__
    return opened


# All functions that the decorator makes share their code.
_MARK = once_differentiable(lambda ctx: None).__code__

# Nodes of the operators in `TWICE`, and of what torch.compile has made.
_NODES = (
    "CompiledFunction",
    *("ScaledDotProduct.*Attention.*", "WeightNormInterface", "Hardsigmoid", "EmbeddingBag", ".*LinearCrossEntropy.*"),
    *("MultiMarginLoss", "MultilabelMarginLoss", *_OLDER),
)
_REPLACEABLE = re.compile(f"({'|'.join(_NODES)})Backward")


def twice_differentiable(
    problem: str, traits: LossTraits, devices: tuple[torch.device, ...], evaluate: Callable[[], Tensor]
) -> Tensor:
    """Return a value of the loss whose gradient can be differentiated.

    Its graph is searched once a problem. Where operators are in it that fail in double backward, or are silently wrong
    there (fused attention, weight normalization), the loss is evaluated with equal ones from then on.

    Args:
        problem: whose loss it is.
        traits: of the loss; says from then on which it is.
        devices: CUDA devices whose generators are used.
        evaluate: returns the value.

    Raises:
        ConfigError: it depends on the parameters through a function that is differentiable once.

    Example:
        >>> theta, traits = torch.tensor([2.0], requires_grad=True), LossTraits()
        >>> twice_differentiable("w", traits, (), lambda: (theta ** 2).sum()).tolist(), traits.is_twice_differentiable
        (4.0, True)
    """
    if traits.is_twice_differentiable:
        return evaluate()
    if not traits.replaces_operators:
        random = RandomState(devices)
        loss = evaluate()
        is_replaced = False
        for node in _nodes([loss]):
            function: Any = getattr(node, "_forward_cls", nn.Identity)
            if getattr(getattr(function, "backward", None), "__code__", None) is _MARK:
                raise ConfigError(_ONCE.format(problem=problem, name=function.__name__))
            is_replaced = is_replaced or _REPLACEABLE.match(node.name()) is not None
        if not is_replaced:
            traits.is_twice_differentiable = True
            return loss
        traits.replaces_operators = True
        random.restore()
    with twice_differentiable_mode(problem):
        return evaluate()


def _nodes(tensors: Sequence[Tensor]) -> Iterator[Any]:
    """Yield the nodes of the graph of tensors, also inside blocks of `remat`, one block at a time.

    The tensors are held meanwhile: without them torch 2.9 gives up what the nodes of functions have saved.
    """
    seen, waiting = set(), [tensor.grad_fn for tensor in tensors]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        yield from _nodes(graph_inside(node))
        waiting += [other for other, _ in node.next_functions]
