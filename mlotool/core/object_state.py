"""What objects of Python hold, as a flat list: to say whether code has changed them, and which tensors are in them."""

from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = (str, int, float, complex, bool, type(None))
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
        self._versions = [_version(each) for each in self._leaves]

    def is_same(self, other: "ObjectState") -> bool:
        """Return whether the objects hold the same."""
        return (
            len(self._leaves) == len(other._leaves)
            and self._versions == other._versions
            and all(map(_is_same, self._leaves, other._leaves))
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
        if isinstance(value, (Tensor, *_PLAIN)):
            yield value
        elif id(value) not in seen:
            seen[id(value)] = value
            parts = _parts(value) if into_modules or not isinstance(value, nn.Module) else None
            yield value if parts is None else type(value)
            if parts is not None:
                yield len(parts)
                waiting += parts[::-1]


def _parts(value: Any) -> list[Any] | None:
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
    try:
        reduced = value.__reduce_ex__(4)
    except Exception:
        # What cannot be pickled, by code of anybody's.
        return None
    if isinstance(reduced, str):
        return None
    _, arguments, *state = reduced
    return [arguments, *state[:1], *[part for items in state[1:3] for part in items or ()]]


def _closed_over(function: FunctionType) -> list[Any]:
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:
            found.append(None)
    return found


def _version(value: Any) -> int | None:
    return value._version if isinstance(value, Tensor) and not value.is_inference() else None


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (isinstance(a, _PLAIN) and type(a) is type(b) and bool(a == b or (a != a and b != b)))
