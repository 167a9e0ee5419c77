"""Which operations a traced graph consists of. Tables for `make_fx` have, by operation of torch, what takes its place.

Batch normalizations whose schema says that they write into the running statistics: `native_batch_norm` and cuDNN's
write in silence, and two equal calls would be taken for one. Operations in the form in which a compiler can fuse them
with their neighbors, or `torch.vmap` knows them.
"""

from collections.abc import Callable, Mapping, Sequence
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch._ops import OpOverload
from torch.func import functionalize
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from mlotool.core.private import schema_of

_ATEN = torch.ops.aten


def _native(x: Tensor, weight: Any, bias: Any, mean: Any, variance: Any, *settings: Any) -> tuple[Tensor, ...]:
    # Without statistics it is another overload.
    statistics = () if mean is None or variance is None else (mean, variance)
    return _ATEN._native_batch_norm_legit(x, weight, bias, *statistics, *settings)


def _cudnn(x: Tensor, weight: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    # Its fourth output is for its own backward pass, in whose place is the native one's.
    return (*_native(x, weight, *arguments), x.new_zeros(0, dtype=torch.uint8))


# A table for `make_fx`.
HONEST_BATCH_NORMS: dict[Any, Callable[..., Any]] = {
    _ATEN.native_batch_norm.default: _native,
    _ATEN.cudnn_batch_norm.default: _cudnn,
    **get_decompositions([_ATEN.cudnn_batch_norm_backward]),
}


def _stackable(x: Tensor, weight: Any, bias: Any, mean: Any, variance: Any, *settings: Any) -> tuple[Tensor, ...]:
    """Return output, the mean and 1 / standard deviation that backward takes, and the running statistics after it."""
    training, momentum, eps = settings
    if not training:
        return (*_ATEN.native_batch_norm(x, weight, bias, mean, variance, False, momentum, eps), mean, variance)
    output, own, scale = _ATEN.native_batch_norm(x, weight, bias, None, None, True, momentum, eps)
    count = x.numel() // x.shape[1]
    unbiased = (scale.square().reciprocal() - eps) * (count / (count - 1))
    return (
        *(output, own, scale),
        torch.lerp(mean, own.to(mean.dtype), momentum),
        torch.lerp(variance, unbiased.to(variance.dtype), momentum),
    )


# A table for `make_fx`: pure ones that `torch.vmap` knows, which turns the axis of members into one of channels.
STACKABLE_BATCH_NORMS: dict[Any, Callable[..., Any]] = {
    _ATEN._native_batch_norm_legit_functional.default: _stackable,
    _ATEN._native_batch_norm_legit.no_stats: lambda x, weight, bias, training, momentum, eps: _ATEN.native_batch_norm(
        x, weight, bias, None, None, training, momentum, eps
    ),
}


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return a (m, k) times b (k, n): without a library's kernel where one of the sizes is 1."""
    (m, k), n = a.shape, b.shape[1]
    if k == 1:
        return a * b
    if n == 1:
        return (a * b.t()).sum(1, keepdim=True)
    return (a.t() * b).sum(0, keepdim=True) if m == 1 else NotImplemented


def _sum_and_product(c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Return beta c + alpha a b: the sum goes into what comes after it."""
    product = torch.mm(a, b)
    return (c if beta == 1 else beta * c) + (product if alpha == 1 else alpha * product)


def _norms(tensors: Sequence[Tensor], order: float = 2, dtype: torch.dtype | None = None) -> list[Tensor]:
    return [torch.linalg.vector_norm(tensor, order, dtype=dtype) for tensor in tensors]


def _one_by_one(name: str) -> dict[Any, Callable[..., Any]]:
    """Return, by overload of an operation on lists, what does the same tensor by tensor."""
    packet, single = getattr(_ATEN, f"_foreach_{name}"), getattr(_ATEN, name)

    def on_lists(tensors: Sequence[Tensor], *others: Any, **settings: Any) -> list[Tensor]:
        lists = [other if isinstance(other, list | tuple) else [other] * len(tensors) for other in others]
        return [single(tensor, *arguments, **settings) for tensor, *arguments in zip(tensors, *lists, strict=True)]

    return {getattr(packet, overload): on_lists for overload in packet.overloads() if not overload.endswith("out")}


FOREACH: dict[Any, Callable[..., Any]] = {_ATEN._foreach_norm.Scalar: _norms}
_NAMES = ("add", "sub", "mul", "div", "neg", "sqrt", "maximum", "minimum", "addcmul", "addcdiv", "reciprocal", "abs")
# A table for `make_fx`: operations on lists, one by one, as `torch.vmap` knows them.
for _name in _NAMES:
    FOREACH |= _one_by_one(_name)

# A table for `make_fx`.
FUSIBLE: dict[Any, Callable[..., Any]] = {
    _ATEN.mm.default: _product,
    _ATEN.addmm.default: _sum_and_product,
    _ATEN._foreach_norm.Scalar: _norms,
}


def without_mutations(
    module: GraphModule, arguments: Sequence[Tensor], table: Mapping[Any, Callable[..., Any]]
) -> GraphModule:
    """Return a module of the same function with no operation in place and none of a table.

    A traced gradient is like that most of the time, and to trace it again takes as long as before.

    Args:
        module: of aten operations.
        arguments: of the module.
        table: for `make_fx`.

    Returns:
        The module itself, where nothing is to be done.
    """
    targets = [node.target for node in module.graph.nodes if node.op == "call_function" and node.target is not getitem]
    pure = all(isinstance(target, OpOverload) and not schema_of(target).is_mutable for target in targets)
    if pure and table.keys().isdisjoint(targets):
        return module
    return make_fx(functionalize(module), {**table})(*arguments)
