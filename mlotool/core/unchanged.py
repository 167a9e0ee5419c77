"""Whether something is still the same: tensors, up to rounding or in form, trees of them, and what objects hold.

A fingerprint is two numbers of a tensor, by which one can tell later whether another one is the same up to rounding.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

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
    """
    (old, old_form), (new, new_form) = tree_flatten(before), tree_flatten(now)
    return old_form == new_form and all(is_same(a, b) for a, b in zip(old, new, strict=True))


def is_same(a: Any, b: Any) -> bool:
    """Say whether two tensors have the same values, NaN included; of other things True."""
    if not isinstance(a, Tensor) or a is b or a.is_meta:
        return True
    return torch.equal(a, b) or torch.equal(a.nan_to_num(), b.nan_to_num())


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

# Some kernels of torch have constants of fp32 in float64 too (hardsigmoid), which two ways to a value meet differently.
_TOLERANCES = {torch.float64: 1e-7, torch.complex128: 1e-7, torch.float32: 2e-3, torch.complex64: 2e-3}
# Of bf16 and fp16; above what kernels differ by that add up in any order.
_TOLERANCE_IN_SHORT = 3e-2


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


def tolerance(dtype: torch.dtype) -> float:
    """Return by how much, beside the norm, two evaluations may differ by rounding.

    Args:
        dtype: of the results; integers are the same.

    Example:
        >>> tolerance(torch.float64)
        1e-07
    """
    is_real = dtype.is_floating_point or dtype.is_complex
    return _TOLERANCES.get(dtype, _TOLERANCE_IN_SHORT) if is_real else 1e-9


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
