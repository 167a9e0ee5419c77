"""Where losses and modules of the user's keep what is no tensor of a problem: attributes, globals, closures."""

import inspect
from collections import deque
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from types import CellType, CodeType
from typing import Any

from torch import Tensor

from mlotool.core.user_code import is_of_user
from mlotool.problem.problem import Problem

_PLAIN = (bool, int, float, complex, str, type(None))
_CONTAINERS = (list, dict, set, deque)

MOST_ELEMENTS = 10_000
"""Of a container, or of a tensor: larger ones are data."""

MOST_WATCHED = 100
"""Elements of a container that is compared before every step."""

_OWN_TO_TORCH = frozenset({"training"})
"""Attributes of modules by which traces are told apart anyway."""


@dataclass(frozen=True, slots=True)
class Place:
    """A place that holds a value.

    Args:
        owner: in words, for messages.
        holder: a namespace.
        key: in it.
    """

    owner: str
    holder: MutableMapping[str, Any]
    key: str

    @property
    def value(self) -> Any:
        """What is there now."""
        return self.holder.get(self.key)


class _Cell(MutableMapping[str, Any]):
    """The variable of a closure as a namespace of one name."""

    def __init__(self, name: str, cell: CellType) -> None:
        self._name, self._cell = name, cell

    def __getitem__(self, key: str) -> Any:
        if key != self._name:
            raise KeyError(key)
        try:
            return self._cell.cell_contents
        except ValueError:
            raise KeyError(key) from None

    def __setitem__(self, key: str, value: Any) -> None:
        self._cell.cell_contents = value

    def __delitem__(self, key: str) -> None:
        del self._cell.cell_contents

    def __iter__(self) -> Iterator[str]:
        return iter((self._name,))

    def __len__(self) -> int:
        return 1


def is_plain(value: Any) -> bool:
    """Say whether a value is a number, a text or nothing."""
    return isinstance(value, _PLAIN)


def is_kept(value: Any) -> bool:
    """Say whether a copy of a value can be compared with it later: plain ones, small containers and tensors."""
    if isinstance(value, Tensor):
        return value.numel() <= MOST_ELEMENTS
    if isinstance(value, _CONTAINERS):
        parts = value.values() if isinstance(value, dict) else value
        return len(value) <= MOST_ELEMENTS and all(isinstance(each, _PLAIN) for each in parts)
    return isinstance(value, _PLAIN)


def is_watched(value: Any) -> bool:
    """Say whether a value is compared before every step: plain ones and containers of a few."""
    return is_plain(value) or (not isinstance(value, Tensor) and is_kept(value) and len(value) <= MOST_WATCHED)


def namespaces(problems: Sequence[Problem]) -> list[tuple[str, str, MutableMapping[str, Any], frozenset[str] | None]]:
    """Return where the user's losses and modules keep values.

    Args:
        problems: of a program.

    Returns:
        The problem, the owner, a namespace, and which names of it count; None is all.
    """
    found: list[tuple[str, str, MutableMapping[str, Any], frozenset[str] | None]] = []
    seen: set[tuple[int, str]] = set()
    for problem in problems:
        name = f"problems.{problem.name}"
        if keywords := getattr(problem.loss, "keywords", None):
            found.append((name, "", keywords, None))
        for holder in (*problem.submodules, *_parts(problem.loss)):
            if not is_of_user(holder):
                continue
            if not inspect.isroutine(holder) and hasattr(holder, "__dict__"):
                found.append((name, f"{type(holder).__name__}.", holder.__dict__, None))
            for function in _functions(holder):
                found += [(name, *each) for each in _names_of(function, seen)]
    return found


def places(problems: Sequence[Problem]) -> list[Place]:
    """Return the places that hold plain values, small containers or tensors which are no problem's."""
    return [
        Place(f"{name}: {owner}{key}", holder, key)
        for name, owner, holder, names in namespaces(problems)
        for key in (holder if names is None else names & holder.keys())
        if key not in _OWN_TO_TORCH and is_kept(holder[key])
    ]


def _parts(loss: Any) -> list[Any]:
    """Return a loss and what it was bound with."""
    function = getattr(loss, "func", loss)
    return [function, getattr(function, "__self__", None), *getattr(loss, "keywords", {}).values()]


def _functions(holder: Any) -> list[Any]:
    """Return the functions that run when a loss or a module is called."""
    if inspect.isroutine(holder):
        return [inspect.unwrap(holder)]
    return [each for name in ("forward", "__call__") if inspect.isfunction(each := getattr(type(holder), name, None))]


def _names_of(
    function: Any, seen: set[tuple[int, str]]
) -> Iterator[tuple[str, MutableMapping[str, Any], frozenset[str] | None]]:
    """Yield the globals and the variables of closures that a function of the user's reads, and those that it calls."""
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType) or not is_of_user(function):
        return
    space = function.__globals__
    names = frozenset(name for name in _names_in(code) if name in space and (id(space), name) not in seen)
    seen |= {(id(space), name) for name in names}
    yield "", space, names
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        if (id(cell), name) not in seen:
            seen.add((id(cell), name))
            yield "", _Cell(name, cell), None
    for name in names:
        if inspect.isfunction(space[name]):
            yield from _names_of(space[name], seen)


def _names_in(code: CodeType) -> set[str]:
    """Return the names that code and what is defined in it look up."""
    inner = [_names_in(each) for each in code.co_consts if isinstance(each, CodeType)]
    return set(code.co_names).union(*inner)
