"""Operations in the form in which a compiler can fuse them with their neighbours, where it would call a library."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_ATEN = torch.ops.aten


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return a (m, k) times b (k, n): without a library's kernel where one of the sizes is 1."""
    (m, k), n = a.shape, b.shape[1]
    if k == 1:
        return a * b
    if n == 1:
        return (a * b.t()).sum(1, keepdim=True)
    if m == 1:
        return (a.t() * b).sum(0, keepdim=True)
    found: Tensor = NotImplemented
    return found


def _sum_and_product(c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Return beta c + alpha a b: the sum goes into what comes after it."""
    product = torch.mm(a, b)
    return (c if beta == 1 else beta * c) + (product if alpha == 1 else alpha * product)


def _norms(tensors: Sequence[Tensor], order: float = 2, dtype: torch.dtype | None = None) -> list[Tensor]:
    return [torch.linalg.vector_norm(each, order, dtype=dtype) for each in tensors]


def _one_by_one(name: str) -> dict[Any, Callable[..., Any]]:
    """Return, by overload of an operation on lists, what does the same tensor by tensor."""
    packet, single = getattr(_ATEN, f"_foreach_{name}"), getattr(_ATEN, name)

    def each(tensors: Sequence[Tensor], *others: Any, **settings: Any) -> list[Tensor]:
        lists = [other if isinstance(other, list | tuple) else [other] * len(tensors) for other in others]
        return [single(tensor, *found, **settings) for tensor, *found in zip(tensors, *lists, strict=True)]

    return {getattr(packet, overload): each for overload in packet.overloads() if not overload.endswith("out")}


FOREACH: dict[Any, Callable[..., Any]] = {_ATEN._foreach_norm.Scalar: _norms}
for _name in (
    "add",
    "sub",
    "mul",
    "div",
    "neg",
    "sqrt",
    "maximum",
    "minimum",
    "addcmul",
    "addcdiv",
    "reciprocal",
    "abs",
):
    FOREACH |= _one_by_one(_name)
"""A table for `make_fx`: operations on lists, one by one, as `torch.vmap` knows them."""

FUSIBLE: dict[Any, Callable[..., Any]] = {
    _ATEN.mm.default: _product,
    _ATEN.addmm.default: _sum_and_product,
    _ATEN._foreach_norm.Scalar: _norms,
}
"""A table for `make_fx`."""
