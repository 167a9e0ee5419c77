"""Where losses and modules of the user's keep what is no tensor of a problem: attributes, globals, closures."""

import copy
import dataclasses
import inspect
import random
from collections import deque
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from operator import is_, itemgetter
from types import CellType, CodeType
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from mlotool.core.user_code import is_of_user
from mlotool.problem.problem import Problem

_HIDDEN = (Iterator, random.Random, numpy.random.RandomState, numpy.random.Generator, torch.Generator)
_PLAIN = (bool, int, float, complex, str, type(None))
_CONTAINERS = list | dict | set | deque

MOST_ELEMENTS = 10_000
"""Of a container, or of a tensor: larger ones are data."""

MOST_NUMBERS = 4_000_000
"""Of a tensor or an array: larger ones are data."""

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
    def identity(self) -> tuple[int, str]:
        """The same whenever it is looked for."""
        return id(getattr(self.holder, "behind", self.holder)), self.key

    @property
    def value(self) -> Any:
        """What is there now."""
        return self.holder.get(self.key)


class _Cell(MutableMapping[str, Any]):
    """The variable of a closure as a namespace of one name."""

    def __init__(self, name: str, cell: CellType) -> None:
        self._name, self.behind = name, cell

    def __getitem__(self, key: str) -> Any:
        if key != self._name:
            raise KeyError(key)
        try:
            return self.behind.cell_contents
        except ValueError:
            raise KeyError(key) from None

    def __setitem__(self, key: str, value: Any) -> None:
        self.behind.cell_contents = value

    def __delitem__(self, key: str) -> None:
        del self.behind.cell_contents

    def __iter__(self) -> Iterator[str]:
        return iter((self._name,))

    def __len__(self) -> int:
        return 1


class _Class(MutableMapping[str, Any]):
    """The attributes of a class, but for its methods and what Python keeps there."""

    def __init__(self, owner: type) -> None:
        self.behind = owner
        self._keys = [
            key for key, value in vars(owner).items() if not key.startswith("__") and not inspect.isroutine(value)
        ]

    def __getitem__(self, key: str) -> Any:
        return vars(self.behind)[key]

    def __setitem__(self, key: str, value: Any) -> None:
        setattr(self.behind, key, value)

    def __delitem__(self, key: str) -> None:
        delattr(self.behind, key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


class _Elements(MutableMapping[str, Any]):
    """The elements of a container as a namespace of their numbers or keys."""

    def __init__(self, elements: Any) -> None:
        self.behind = elements
        keys = elements if isinstance(elements, dict) else range(len(elements))
        self._keys = {str(key): key for key in keys}

    def __getitem__(self, key: str) -> Any:
        try:
            return self.behind[self._keys[key]]
        except IndexError:
            raise KeyError(key) from None

    def __setitem__(self, key: str, value: Any) -> None:
        # A tuple has what it has.
        if not isinstance(self.behind, tuple):
            self.behind[self._keys[key]] = value

    def __delitem__(self, key: str) -> None:
        if not isinstance(self.behind, tuple):
            del self.behind[self._keys[key]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def _values(container: Any) -> list[Any]:
    return [*islice(container.values() if isinstance(container, dict) else container, MOST_ELEMENTS)]


def is_plain(value: Any) -> bool:
    """Say whether a value is a number, a text or nothing."""
    return isinstance(value, _PLAIN)


def is_kept(value: Any) -> bool:
    """Say whether a copy of a value can be compared with it later: plain ones, small containers and tensors."""
    if isinstance(value, Tensor | numpy.ndarray):
        return (value.numel() if isinstance(value, Tensor) else value.size) <= MOST_NUMBERS
    if isinstance(value, _CONTAINERS):
        parts = value.values() if isinstance(value, dict) else value
        return len(value) <= MOST_ELEMENTS and all(isinstance(each, _PLAIN) for each in parts)
    return isinstance(value, _PLAIN)


def is_watched(value: Any) -> bool:
    """Say whether a value is compared before every step: plain ones and containers of a few."""
    if isinstance(value, numpy.ndarray):
        return value.size <= MOST_WATCHED
    return is_plain(value) or (not isinstance(value, Tensor) and is_kept(value) and len(value) <= MOST_WATCHED)


Namespace = tuple[str, str, MutableMapping[str, Any], frozenset[str] | None]
"""The problem, the owner, what holds values by name, and which of the names count; None is all."""


def namespaces(problems: Sequence[Problem]) -> list[Namespace]:
    """Return where the user's losses and modules, and what they call and hold, keep values.

    Args:
        problems: of one program.
    """
    return [(name, *space) for name, part in _reached(problems) for space in _spaces(part)]


def hidden_state(problems: Sequence[Problem]) -> str | None:
    """Return what the user's losses and modules hold that gives another value each time, which no look tells.

    Args:
        problems: of one program.
    """
    for name, part in _reached(problems):
        if isinstance(part, _HIDDEN):
            return f"{name}: what it computes with gives other values each time ({type(part).__name__})"
    return None


def held_modules(problems: Sequence[Problem]) -> list[nn.Module]:
    """Return the modules, with what is inside, that losses and modules hold and that are no problem's.

    Args:
        problems: of one program.
    """
    own = {id(module) for each in problems for module in each.submodules}
    found = {
        id(inner): inner for _, part in _reached(problems) if isinstance(part, nn.Module) for inner in part.modules()
    }
    return [module for number, module in found.items() if number not in own]


def _reached(problems: Sequence[Problem]) -> Iterator[tuple[str, Any]]:
    """Yield what a program's losses and modules are, call and hold, each once, with the problem's name."""
    seen: dict[int, Any] = {}
    for problem in problems:
        waiting: list[Any] = [problem.loss, *problem.submodules]
        while waiting and len(seen) < MOST_ELEMENTS:
            part = waiting.pop(0)
            if id(part) in seen:
                continue
            # Kept, so that no other object takes its number.
            seen[id(part)] = part
            yield f"problems.{problem.name}", part
            waiting += _parts(part)
            for _, space, names in _spaces(part):
                values = [space.get(key) for key in (space if names is None else names)]
                waiting += [each for each in values if not isinstance(each, (Tensor, *_PLAIN))]


def places(problems: Sequence[Problem]) -> list[Place]:
    """Return the places that hold plain values, small containers or tensors which are no problem's."""
    found: dict[tuple[int, str], Place] = {}
    own = {_memory(each) for problem in problems for each in (*problem.module.parameters(), *problem.module.buffers())}
    for name, owner, holder, names in namespaces(problems):
        for key in holder if names is None else names & holder.keys():
            value = holder[key]
            if isinstance(value, Tensor | numpy.ndarray) and _memory(value) in own:
                continue
            if key not in _OWN_TO_TORCH and is_kept(value):
                place = Place(f"{name}: {owner}{key}", holder, key)
                found.setdefault(place.identity, place)
    return [*found.values()]


def _memory(value: Any) -> int:
    """Return what tensors and arrays have in common that are views of one memory: where it begins."""
    if isinstance(value, numpy.ndarray):
        while isinstance(value.base, numpy.ndarray):
            value = value.base
        return int(value.__array_interface__["data"][0])
    is_plain = value.layout is torch.strided and not value.is_meta
    return int(value.untyped_storage().data_ptr()) if is_plain and value.numel() else id(value)


def _parts(part: Any) -> list[Any]:
    """Return what a function is bound with, and what a container holds, where it is more than plain values."""
    if isinstance(part, partial):
        return [part.func, *part.args, *part.keywords.values()]
    if inspect.ismethod(part):
        return [part.__self__, part.__func__]
    if inspect.isfunction(part):
        return [*(part.__defaults__ or ())] if is_of_user(part) else []
    if isinstance(part, _CONTAINERS | tuple):
        inside = part.values() if isinstance(part, dict) else part
        return [each for each in islice(inside, MOST_ELEMENTS) if not isinstance(each, (Tensor, *_PLAIN))]
    return []


def _spaces(part: Any) -> Iterator[tuple[str, MutableMapping[str, Any], frozenset[str] | None]]:
    """Yield where a function or an object keeps values: what it is bound with, attributes, globals and closures."""
    if isinstance(part, partial):
        yield "", part.keywords, None
    elif inspect.isfunction(part) or inspect.ismethod(part):
        yield from _names_of(inspect.unwrap(part))
    elif isinstance(part, list | tuple | deque | dict) and not all(isinstance(each, _PLAIN) for each in _values(part)):
        yield "element ", _Elements(part), None
    elif not (inspect.isroutine(part) or inspect.isclass(part) or inspect.ismodule(part)) and _is_followed(part):
        if hasattr(part, "__dict__"):
            yield f"{type(part).__name__}.", part.__dict__, None
        for each in type(part).__mro__:
            if is_of_user(each):
                yield f"{each.__name__}.", _Class(each), None
                for method in [value for value in vars(each).values() if inspect.isfunction(value)]:
                    yield from _names_of(inspect.unwrap(method))


def _names_of(function: Any) -> Iterator[tuple[str, MutableMapping[str, Any], frozenset[str] | None]]:
    """Yield the globals and the variables of closures that a function of the user's reads."""
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType) or not is_of_user(function):
        return
    space = function.__globals__
    yield "", space, frozenset(name for name in _names_in(code) if name in space)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        yield "", _Cell(name, cell), None
    if function.__kwdefaults__:
        yield "", function.__kwdefaults__, None


def _is_followed(part: Any) -> bool:
    """Say whether an object is a user's, or one of a library that is to hold what a user puts there."""
    kind = type(part)
    return is_of_user(part) or kind.__module__ == "types" or dataclasses.is_dataclass(kind)


def _names_in(code: CodeType) -> set[str]:
    """Return the names that code and what is defined in it look up."""
    inner = [_names_in(each) for each in code.co_consts if isinstance(each, CodeType)]
    return set(code.co_names).union(*inner)


# What torch keeps in a module, but for its mode; hooks, parameters and submodules are looked at by themselves.
OF_TORCH = frozenset(vars(nn.Module())) - {"training"}


class PythonState:
    """The state of a program beside its parameters and buffers, before its losses are evaluated.

    Numbers, texts, and small containers and tensors are looked at: in the attributes of modules and losses that are the
    user's, and in the globals and closures that their functions read.

    Args:
        problems: of one program.
    """

    def __init__(self, problems: Sequence[Problem]) -> None:
        self._spaces = [(holder, set(holder)) for _, _, holder, names in namespaces(problems) if names is None]
        self._kept = [(place, place.value, _copy(place.value)) for place in places(problems)]
        modules = [(f"problems.{each.name}", module) for each in problems for module in each.submodules]
        self._frozen = [
            (name, parameter, parameter.detach().clone())
            for name, module in modules
            for parameter in module._parameters.values()
            if parameter is not None and not parameter.requires_grad
        ]
        parameters = [parameter for each in problems for parameter in each.module.parameters()]
        self._hooks = [(each, {*(each._backward_hooks or {})}) for each in parameters]
        self._numpy, self._python = numpy.random.get_state(), random.getstate()
        self._problems = problems

    def restore(self) -> None:
        """Put all of it back."""
        for holder, before in self._spaces:
            for key in [key for key in holder if key not in before]:
                del holder[key]
        for place, value, kept in self._kept:
            _restore(place, value, kept)
        for _, parameter, kept in self._frozen:
            parameter.data.copy_(kept)
        for parameter, there in self._hooks:
            hooks: Any = parameter._backward_hooks or {}
            for key in {*hooks} - there:
                del hooks[key]
        numpy.random.set_state(self._numpy)
        random.setstate(self._python)

    def change(self) -> str | None:
        """Return what has changed, as a sentence."""
        known = {place.identity for place, _, _ in self._kept}
        now = [each for each in places(self._problems) if not isinstance(each.value, Tensor)]
        new = [each for each in now if each.identity not in known]
        changed = [place for place, value, kept in self._kept if _has_changed(place.value, value, kept)]
        for parameter, there in self._hooks:
            if {*(parameter._backward_hooks or {})} - there:
                return "evaluating a loss puts a hook on a parameter, which a trace does not call"
        for place in (*changed, *new):
            problem, _, owner = place.owner.partition(": ")
            return f"{problem}: evaluating its loss changes {owner}, which a trace would fix"
        for name, parameter, kept in self._frozen:
            if not _is_equal(parameter, kept):
                return f"{name}: evaluating its loss moves a frozen parameter, which a trace would fix"
        state: Any = numpy.random.get_state()
        before: Any = self._numpy
        if state[2] != before[2] or not (state[1] == before[1]).all() or random.getstate() != self._python:
            return "a loss draws from numpy's or Python's global random numbers"
        return None


class PythonWatch:
    """Sees whether numbers, texts and small containers of several programs are what they were when it was made.

    A trace holds them fixed, while a scheduler or a callback may change them between two ticks. A look takes 50 ns for
    each of them; there are none but in code of the user's.

    Args:
        members: by member the problems of its program.
    """

    def __init__(self, members: Sequence[Sequence[Problem]]) -> None:
        # A global that several read is looked at once.
        there = [each for problems in members for each in places(problems) if not _is_torchs(each)]
        found = {each.identity: each for each in there if is_watched(each.value)}
        by_holder: dict[int, list[Place]] = {}
        for each in found.values():
            by_holder.setdefault(id(each.holder), []).append(each)
        ordered = [*chain(*by_holder.values())]
        self._kept = [(each, each.value, _copy(each.value)) for each in ordered]
        # One key more than there are, so that it gives a tuple in any case.
        self._getters = [
            (itemgetter(*[each.key for each in there], there[0].key), there[0].holder) for there in by_holder.values()
        ]
        self._values = [*chain(*self._look())]
        # These are the same object when they have changed in place.
        self._containers = [(value, kept) for _, value, kept in self._kept if not is_plain(value)]

    def change(self) -> str | None:
        """Return the place of what has changed."""
        try:
            are_there = all(map(is_, chain.from_iterable(self._look()), self._values))
        except KeyError:
            are_there = False
        if are_there and all(_is_same(value, kept) for value, kept in self._containers):
            return None
        changed = [place.owner for place, _, kept in self._kept if not _is_same(place.value, kept)]
        return changed[0] if changed else None

    def _look(self) -> list[Any]:
        return [get(holder) for get, holder in self._getters]


def _is_torchs(place: Place) -> bool:
    """Return whether torch itself keeps something in this place, which is among the attributes of a module."""
    return place.key in OF_TORCH and place.holder.keys() >= OF_TORCH


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value if is_plain(value) else copy.copy(value)


def _has_changed(now: Any, value: Any, kept: Any) -> bool:
    """Return whether what was `value`, and equal to `kept`, is another one now."""
    if isinstance(value, Tensor):
        # One that is put in its place is most often a result that is kept to be looked at.
        return now is value and not _is_equal(value, kept)
    return not _is_same(now, kept)


def _is_equal(tensor: Tensor, kept: Tensor) -> bool:
    return torch.allclose(tensor.detach(), kept, rtol=0, atol=0, equal_nan=True)


def _is_same(value: Any, kept: Any) -> bool:
    if isinstance(value, numpy.ndarray):
        return isinstance(kept, numpy.ndarray) and numpy.array_equal(value, kept, equal_nan=value.dtype.kind in "fc")
    return type(value) is type(kept) and bool(value == kept or (value != value and kept != kept))


def _restore(place: Place, value: Any, kept: Any) -> None:
    """Put a value back, into the object that held it where it is one that changes in place."""
    if isinstance(value, Tensor):
        if not _is_equal(value, kept):
            with torch.no_grad():
                value.data.copy_(kept)
    elif isinstance(value, numpy.ndarray):
        if not _is_same(value, kept):
            value[...] = kept
    elif isinstance(value, list | deque):
        if value != kept:
            value.clear()
            value.extend(kept)
    elif isinstance(value, dict | set) and value != kept:
        value.clear()
        value.update(kept)
    if place.holder.get(place.key) is not value:
        place.holder[place.key] = value
