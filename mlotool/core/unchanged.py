"""Whether something is still the same: tensors, up to rounding or in form, trees of them, and what objects hold.

How far rounding may take two ways to one result apart stands in one table for all of mlotool, below `Tolerance`.

A fingerprint is two numbers of a tensor, by which one can tell later whether another one is the same up to rounding.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._dynamo.guards import TensorGuards

from mlotool.core.private import device_mode as _device
from mlotool.core.private import tree_flatten, tree_map


def snapshot(value: Any) -> Any:
    """Return a tree (dicts, lists, tuples) with copies of its tensors."""
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, value)


def deep_copy(value: Any) -> Any:
    """Return a deep copy, of tensors that are parts of larger ones without what else these hold.

    Args:
        value: a tree with any leaves.

    Example:
        >>> deep_copy({"row": torch.zeros(100, 2)[0]})["row"].untyped_storage().nbytes()
        8
    """
    tensors = [entry for entry in tree_flatten(value)[0] if isinstance(entry, Tensor)]
    return copy.deepcopy(value, {id(tensor): tensor.detach().clone() for tensor in tensors})


def is_unchanged(before: Any, now: Any) -> bool:
    """Say whether a tree has the form and the tensors that its snapshot has.

    Example:
        >>> batch = {"input": torch.zeros(2)}
        >>> before = snapshot(batch)
        >>> is_unchanged(before, batch), is_unchanged(before, {"input": batch["input"].add_(1)})
        (True, False)
        >>> is_unchanged(torch.tensor([torch.nan]), torch.zeros(1))
        False
    """
    (old, old_form), (new, new_form) = tree_flatten(before), tree_flatten(now)
    return old_form == new_form and all(is_same(a, b) for a, b in zip(old, new, strict=True))


def is_same(a: Any, b: Any) -> bool:
    """Say whether two tensors have the same type and values, NaN included; of other things True."""
    if not isinstance(a, Tensor) or a is b or a.is_meta:
        return True
    if not isinstance(b, Tensor) or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or (a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all()))


def is_rounded(tensor: Tensor) -> bool:
    """Say whether operations round the numbers of a tensor, as they do not with integers."""
    return tensor.is_floating_point() or tensor.is_complex()


_COLUMNS = {torch.float64: 0, torch.complex128: 0, torch.float32: 1, torch.complex64: 1}


class Tolerance(NamedTuple):
    """How far rounding may take two ways to one result apart: norm of the difference over norm of the result.

    Args:
        double: of float64 and complex128.
        single: of float32 and complex64.
        half: of fp16 and bf16, and of what autocast computes in them.

    Example:
        >>> ANY_KERNELS.of(torch.float64)
        1e-07
        >>> one = torch.tensor([1.0, torch.nan])
        >>> ANY_KERNELS.covers(one, 1.001 * one), ANY_KERNELS.covers(one, 1.01 * one)
        (True, False)
    """

    double: float
    single: float
    half: float

    def of(self, dtype: torch.dtype) -> float:
        """Return the bound for results of a type; integers are the same."""
        return self[_COLUMNS.get(dtype, 2)] if dtype.is_floating_point or dtype.is_complex else 1e-9

    def covers(self, a: Tensor, b: Tensor, floor: float = 0.0) -> bool:
        """Say whether two results are the same but for rounding; what is not finite has to be so in both.

        Args:
            a: of any dtype, with a dense layout in memory.
            b: on the same device.
            floor: a norm below which that of the result does not count.
        """
        is_finite = a.isfinite()
        if not is_rounded(a) or not torch.equal(is_finite, b.isfinite()):
            return is_same(a, b)
        if not is_finite.all():
            others = (tensor.where(~is_finite, 0.0) for tensor in (a, b))
            return is_same(*others) and self.covers(a.where(is_finite, 0.0), b.where(is_finite, 0.0), floor)
        # In the tensors' own type the norm of large numbers overflows.
        norm = partial(torch.linalg.vector_norm, dtype=torch.complex128 if a.is_complex() else torch.float64)
        return float(norm(a - b)) <= self.of(a.dtype) * max(float(norm(a)), float(norm(b)), floor)


# All bounds of comparisons that ask whether two results are the same. A number by which an algorithm ends, or takes
# another number for zero, stands with its algorithm.

# A block of `remat` that is evaluated again on a CPU: a kernel may depend on whether a graph is kept.
SAME_KERNELS = Tolerance(1e-9, 2e-5, 3e-2)
# The same on a GPU or with autocast, the gradient of a step that is taken again, and a frozen part that another run
# has evaluated: kernels may add up in any order. Some of torch's have constants of float32 in float64 too
# (hardsigmoid), which two ways to a value meet differently.
ANY_KERNELS = Tolerance(1e-7, 2e-3, 3e-2)
# A loss that is evaluated again, and gradients of two runs that are one function, by the same operations on a CPU,
# which most often give the same bits: eps^0.75.
SAME_OPERATIONS = Tolerance(2.0**-39, 2.0**-17.25, 1e-3)
# A loss that is evaluated again on a GPU, where a sum may have another order each time; on any device, loss and
# gradient with the same values in other tensors.
EVALUATIONS = Tolerance(1e-3, 1e-3, 1e-3)
# Gradients of two runs that are one function on a GPU, where a sum may have another order each time.
RACES = Tolerance(1e-2, 1e-2, 1e-2)
# Second-order products by forward mode and by double backward, which are two formulas.
FORWARD_MODE = Tolerance(1e-7, 1e-2, 0.1)
# Logits of a language model and the product of its features with its head: a small bias has to show, whatever the type.
LINEAR_HEAD = Tolerance(1e-6, 1e-6, 1e-6)
# Norms of the parameters on two ranks, whose exchange makes no difference.
RANKS = 1e-4
# Products by finite differences, taken in two ways, differ by less than this share; beside that, by so many rounding
# errors of the gradient over the radius.
PRODUCTS, PRODUCT_ROUNDINGS = 0.1, 1
# Steps and gradients by a trace, or by one program for several runs, and by the plans (`program/agreement.py`). What
# counts is the rounding error of the lowest precision in which a trace computes. So many of the values are nothing;
VALUE_ROUNDINGS = 4
# relative to what a step has moved, this power of the rounding error is allowed;
ROUNDING_POWER = 0.75
# where that is more, so many times what a step changes by when the parameters are moved by one rounding error.
ROUNDING = 32.0


_SETTINGS: dict[str, Callable[[], Any]] = {
    "set_grad_enabled": torch.is_grad_enabled,
    "set_default_dtype": torch.get_default_dtype,
    # None is another state than the CPU by name, for which each call passes through a mode of torch's.
    "set_default_device": lambda: _device.CURRENT_DEVICE,
}


def torch_settings() -> dict[str, Any]:
    """Return what torch keeps for a whole process, by the function that changes it."""
    return {f"torch.{name}": read() for name, read in _SETTINGS.items()}


def restore_torch_settings(settings: dict[str, Any]) -> list[str]:
    """Put back what `torch_settings` returned; return the functions that had changed some of it."""
    changed = [name for name, value in torch_settings().items() if value != settings[name]]
    for name in changed:
        getattr(torch, name.removeprefix("torch."))(settings[name])
    return changed


# Entries that are taken in float64 at once: 2 MiB, whatever the tensor's size is.
_CHUNK = 1 << 18


def fingerprint(tensor: Tensor) -> Tensor:
    """Return the inner product of a tensor with a fixed one, and its norm, (2,) in float64, without a derivative.

    What is no finite number counts as zero.

    Args:
        tensor: of any dtype and layout in memory.

    Example:
        >>> fingerprint(torch.ones(2))
        tensor([1.5000, 1.4142], dtype=torch.float64)
    """
    with torch.no_grad():
        there = tensor.detach()
        flat = torch.view_as_real(there.resolve_conj()) if there.is_complex() else there
        sums = torch.zeros(2, dtype=torch.float64, device=flat.device)
        begin, count = 0, max(flat.numel(), 1)
        for part in flat.reshape(-1).split(_CHUNK):
            values = part.double().nan_to_num(0.0, 0.0, 0.0)
            end = begin + values.numel()
            ramp = torch.arange(begin, end, dtype=values.dtype, device=values.device).div_(count).add_(0.5)
            sums += torch.stack([values @ ramp, values @ values])
            begin = end
        sums[1].sqrt_()
    return sums


class SameObjects:
    """Remembers the objects that a function has found, and says later whether it finds the same ones again.

    Args:
        look: returns them; numbers count as the same only if they are the same object.

    Example:
        >>> settings = {"rate": 0.1}
        >>> same = SameObjects(lambda: list(settings.values()))
        >>> same(), settings.update(rate=0.2), same()
        (True, None, False)
    """

    def __init__(self, look: Callable[[], Sequence[Any]]) -> None:
        self._look = look
        self._kept = look()

    def __call__(self) -> bool:
        """Say whether they are the same."""
        now, kept = self._look(), self._kept
        return len(now) == len(kept) and all(map(is_, now, kept))


class SameForms:
    """Remembers sizes, strides, types and `requires_grad` of tensors, which `tensor.data = ...` may change.

    It asks as torch's compiler does, which is three times as fast as asking each tensor for each of them.

    Args:
        tensors: in order.

    Example:
        >>> weight = torch.ones(2, 3)
        >>> same = SameForms([weight])
        >>> weight.data = weight.data.mT
        >>> same([weight])
        False
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._number = len(tensors)
        self._guards: Any = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)

    def __reduce__(self) -> tuple[Any, ...]:
        """Let a copy remember nothing, so that its owner looks anew: what torch's compiler keeps cannot be copied."""
        return SameForms, ([],)

    def __call__(self, tensors: Sequence[Tensor]) -> bool:
        """Say whether they are the same, asked where nothing else than before sees operations of torch."""
        return len(tensors) == self._number and bool(self._guards.check(*tensors))


_PLAIN_VALUES = (str, int, float, complex, bool, type(None))
_NAMED = (type, BuiltinFunctionType, ModuleType)


class IteratorFoundError(Exception):
    """There is an iterator among what an object holds: to look at what is left in it would use it up."""


class ObjectState:
    """What some objects hold now; tensors count by identity and by how often they were changed in place.

    Args:
        values: any objects.

    Raises:
        IteratorFoundError: one of them is an iterator, or holds one.

    Example:
        >>> cache = {"seen": [1]}
        >>> before = ObjectState([cache])
        >>> before.is_same(ObjectState([cache])), cache["seen"].append(2), before.is_same(ObjectState([cache]))
        (True, None, False)
    """

    def __init__(self, values: Iterable[Any]) -> None:
        self._leaves = list(leaves_of(values))
        self._versions = [_version(leaf) for leaf in self._leaves]

    def is_same(self, other: "ObjectState") -> bool:
        """Return whether the objects hold the same."""
        return (
            len(self._leaves) == len(other._leaves)
            and self._versions == other._versions
            and all(map(_is_same_leaf, self._leaves, other._leaves))
        )


def leaves_of(values: Iterable[Any], *, into_modules: bool = True) -> Iterator[Any]:
    """Yield what objects hold at any depth: tensors, plain values, and what cannot be looked into.

    An object is taken apart as `pickle` would, which knows containers, arrays, generators of random numbers and
    classes of anybody's. Functions hold what they close over.

    Args:
        values: any objects.
        into_modules: whether modules are taken apart.

    Raises:
        IteratorFoundError: there is an iterator.

    Example:
        >>> list(leaves_of([{"a": (1, "text")}]))[-2:]
        [1, 'text']
    """
    # With the objects, since parts that were made for the look could leave their ids to others.
    seen: dict[int, Any] = {}
    waiting = [*values][::-1]
    while waiting:
        value = waiting.pop()
        if isinstance(value, (Tensor, *_PLAIN_VALUES)):
            yield value
        elif id(value) not in seen:
            seen[id(value)] = value
            parts = _held_by(value) if into_modules or not isinstance(value, nn.Module) else None
            yield value if parts is None else type(value)
            if parts is not None:
                yield len(parts)
                waiting += parts[::-1]


def _held_by(value: Any) -> list[Any] | None:
    """Return what an object holds; None where it cannot be looked into."""
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, bytes | bytearray):
        return [hash(bytes(value))]
    if isinstance(value, FunctionType):
        return [value.__code__.co_name, value.__defaults__, value.__kwdefaults__, *_closed_over(value)]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, torch.Generator):
        return [hash(value.get_state().numpy().tobytes())]
    if hasattr(type(value), "__next__"):
        raise IteratorFoundError
    if isinstance(value, _NAMED):
        return None
    # What cannot be pickled, by code of anybody's, is no tuple.
    reduced = None
    with suppress(Exception):
        reduced = value.__reduce_ex__(4)
    if not isinstance(reduced, tuple):
        return None
    _, arguments, *state = reduced
    return [arguments, *state[:1], *[part for items in state[1:3] for part in items or ()]]


def _closed_over(function: FunctionType) -> list[Any]:
    values = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):
            values.append(cell.cell_contents)
    return values


def _version(value: Any) -> int | None:
    return value._version if isinstance(value, Tensor) and not value.is_inference() else None


def _is_same_leaf(a: Any, b: Any) -> bool:
    return a is b or (isinstance(a, _PLAIN_VALUES) and type(a) is type(b) and bool(a == b or (a != a and b != b)))
