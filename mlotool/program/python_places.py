"""Where losses and modules of the user's keep what is no tensor of a problem, and what evaluating a loss changes there.

Numbers, texts, and small containers and tensors are looked at: in the attributes of modules and losses that are the
user's, and in the globals and closures that their functions read. A trace would fix them.
"""

import copy
import dataclasses
import inspect
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from types import CodeType
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from mlotool.core.user_code import is_of_user
from mlotool.problem.problem import Problem

MOST_ELEMENTS = 10_000
"""A container of more elements is data."""

MOST_NUMBERS = 4_000_000
"""A tensor or an array of more numbers is data."""

MOST_WATCHED = 100
"""A container of up to so many elements is compared before every step."""

_HIDDEN = (Iterator, random.Random, numpy.random.RandomState, numpy.random.Generator, torch.Generator)
_PLAIN = (bool, int, float, complex, str, type(None))
_CONTAINERS = (list, dict, set, deque)


@dataclass(frozen=True, slots=True)
class PythonPlace:
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


class _Space(MutableMapping[str, Any]):
    """What keeps values beside a dict, as a namespace: a closure's variable, a class, a container.

    Args:
        behind: what keeps them.
        keys: by name the key there.
        read: returns the value of a key.
        write: sets it.
        remove: removes it.
    """

    def __init__(
        self,
        behind: Any,
        keys: Mapping[str, Any],
        read: Callable[[Any], Any],
        write: Callable[[Any, Any], Any],
        remove: Callable[[Any], Any],
    ) -> None:
        self.behind, self._keys, self._read, self._write, self._remove = behind, keys, read, write, remove

    def __getitem__(self, key: str) -> Any:
        try:
            return self._read(self._keys[key])
        except (ValueError, IndexError):
            # A variable without a value; a container that has become shorter.
            raise KeyError(key) from None

    def __setitem__(self, key: str, value: Any) -> None:
        self._write(self._keys[key], value)

    def __delitem__(self, key: str) -> None:
        self._remove(self._keys[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


_Named = tuple[str, MutableMapping[str, Any], frozenset[str] | None]
"""Where values are kept: the owner, what holds them by name, and which of the names count; None is all."""


class PythonState:
    """The state of a program beside its parameters and buffers, before its losses are evaluated.

    Args:
        problems: of one program.
    """

    def __init__(self, problems: Sequence[Problem]) -> None:
        self._problems = problems
        self._spaces = [(holder, {*holder}) for _, _, holder, names in _namespaces(problems) if names is None]
        self._kept = [(place, place.value, copied_value(place.value)) for place in places(problems)]
        self._frozen = [
            (f"problems.{problem.name}", parameter, parameter.detach().clone())
            for problem in problems
            for module in problem.submodules
            for parameter in module._parameters.values()
            if parameter is not None and not parameter.requires_grad
        ]
        parameters = [parameter for problem in problems for parameter in problem.module.parameters()]
        self._hooks = [(parameter, {*(parameter._backward_hooks or {})}) for parameter in parameters]
        self._numpy: Any = numpy.random.get_state()
        self._python = random.getstate()

    def restore(self) -> None:
        """Put all of it back."""
        for holder, before in self._spaces:
            for key in {*holder} - before:
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
        if any({*(parameter._backward_hooks or {})} - there for parameter, there in self._hooks):
            return "evaluating a loss puts a hook on a parameter, which a trace does not call"
        known = {place.identity for place, _, _ in self._kept}
        new = [place for place in places(self._problems) if place.identity not in known]
        changed = [place for place, value, kept in self._kept if _has_changed(place.value, value, kept)]
        for place in (*changed, *[place for place in new if not isinstance(place.value, Tensor)]):
            problem, _, owner = place.owner.partition(": ")
            return f"{problem}: evaluating its loss changes {owner}, which a trace would fix"
        for name, parameter, kept in self._frozen:
            if not is_same_value(parameter, kept):
                return f"{name}: evaluating its loss moves a frozen parameter, which a trace would fix"
        state: Any = numpy.random.get_state()
        is_drawn = state[2] != self._numpy[2] or not (state[1] == self._numpy[1]).all()
        if is_drawn or random.getstate() != self._python:
            return "a loss draws from numpy's or Python's global random numbers"
        return None


def places(problems: Sequence[Problem]) -> list[PythonPlace]:
    """Return the places that hold plain values, small containers or tensors which are no problem's."""
    found: dict[tuple[int, str], PythonPlace] = {}
    own = {_memory(x) for problem in problems for x in (*problem.module.parameters(), *problem.module.buffers())}
    for name, owner, holder, names in _namespaces(problems):
        for key in holder if names is None else names & holder.keys():
            value = holder[key]
            is_own = isinstance(value, Tensor | numpy.ndarray) and _memory(value) in own
            # Traces are told apart by the modes of modules anyway.
            if not is_own and key != "training" and _is_kept(value):
                place = PythonPlace(f"{name}: {owner}{key}", holder, key)
                found.setdefault(place.identity, place)
    return [*found.values()]


def is_watched(value: Any) -> bool:
    """Say whether a value is compared before every step: plain ones and containers of a few."""
    if isinstance(value, numpy.ndarray):
        return value.size <= MOST_WATCHED
    is_few = isinstance(value, _PLAIN) or (isinstance(value, _CONTAINERS) and len(value) <= MOST_WATCHED)
    return is_few and _is_kept(value)


def copied_value(value: Any) -> Any:
    """Return what is compared with a value later."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.copy(value) if isinstance(value, (*_CONTAINERS, numpy.ndarray)) else value


def is_same_value(value: Any, kept: Any) -> bool:
    """Say whether a value is what it was when it was copied; NaN is equal to itself."""
    if value is kept:
        return True
    if isinstance(value, Tensor) and isinstance(kept, Tensor):
        return torch.allclose(value.detach(), kept, rtol=0, atol=0, equal_nan=True)
    if isinstance(value, numpy.ndarray) and isinstance(kept, numpy.ndarray):
        return numpy.array_equal(value, kept, equal_nan=value.dtype.kind in "fc")
    if type(value) is not type(kept) or not isinstance(value, (*_PLAIN, *_CONTAINERS, tuple)):
        return False
    try:
        return bool(value == kept or (value != value and kept != kept))
    except Exception:
        # Such as of tensors inside, which compare by their entries.
        return False


def hidden_state(problems: Sequence[Problem]) -> str | None:
    """Return what the losses and modules of one program hold that gives another value each time, as no look tells."""
    for name, part in _reached(problems):
        if isinstance(part, _HIDDEN):
            return f"{name}: what it computes with gives other values each time ({type(part).__name__})"
    return None


def held_modules(problems: Sequence[Problem]) -> list[nn.Module]:
    """Return the modules, with what is inside, that losses and modules of one program hold; no problem's own."""
    own = {id(module) for problem in problems for module in problem.submodules}
    modules = [module for _, part in _reached(problems) if isinstance(part, nn.Module) for module in part.modules()]
    return [module for number, module in {id(module): module for module in modules}.items() if number not in own]


def _is_kept(value: Any) -> bool:
    """Say whether a copy of a value can be compared with it later: plain ones, small containers and tensors."""
    if isinstance(value, Tensor | numpy.ndarray):
        return (value.numel() if isinstance(value, Tensor) else value.size) <= MOST_NUMBERS
    if isinstance(value, _CONTAINERS):
        return len(value) <= MOST_ELEMENTS and not _richer(value)
    return isinstance(value, _PLAIN)


def _richer(container: Any) -> list[Any]:
    """Return the elements of a container that are more than plain values; of a large one of its first ones."""
    elements = islice(container.values() if isinstance(container, dict) else container, MOST_ELEMENTS)
    return [element for element in elements if not isinstance(element, _PLAIN)]


def _has_changed(now: Any, value: Any, kept: Any) -> bool:
    """Say whether what was `value`, and equal to `kept`, is another one now."""
    # A tensor that is put in its place is most often a result that is kept to be looked at.
    return (now is value or not isinstance(value, Tensor)) and not is_same_value(now, kept)


def _restore(place: PythonPlace, value: Any, kept: Any) -> None:
    """Put a value back, into the object that held it where it is one that changes in place."""
    if not is_same_value(value, kept):
        if isinstance(value, Tensor):
            value.data.copy_(kept)
        elif isinstance(value, numpy.ndarray):
            value[...] = kept
        else:
            value.clear()
            (value.extend if isinstance(value, list | deque) else value.update)(kept)
    if place.value is not value:
        place.holder[place.key] = value


def _memory(value: Any) -> int:
    """Return what tensors and arrays have in common that are views of one memory: where it begins."""
    if isinstance(value, numpy.ndarray):
        while isinstance(value.base, numpy.ndarray):
            value = value.base
        return int(value.__array_interface__["data"][0])
    is_plain = value.layout is torch.strided and not value.is_meta
    return int(value.untyped_storage().data_ptr()) if is_plain and value.numel() else id(value)


def _namespaces(problems: Sequence[Problem]) -> list[tuple[str, str, MutableMapping[str, Any], frozenset[str] | None]]:
    """Return where the user's losses and modules, and what they call and hold, keep values; with the problem."""
    return [(name, *space) for name, part in _reached(problems) for space in _spaces(part)]


def _reached(problems: Sequence[Problem]) -> Iterator[tuple[str, Any]]:
    """Yield what a program's losses and modules are, call and hold, once each, with the problem's name."""
    # The objects are kept, so that no other one takes its number.
    seen: dict[int, Any] = {}
    for problem in problems:
        waiting: list[Any] = [problem.loss, *problem.submodules]
        while waiting and len(seen) < MOST_ELEMENTS:
            part = waiting.pop(0)
            if id(part) in seen:
                continue
            seen[id(part)] = part
            yield f"problems.{problem.name}", part
            waiting += _parts(part)
            for _, space, names in _spaces(part):
                values = [space.get(key) for key in (space if names is None else names)]
                waiting += [value for value in values if not isinstance(value, (Tensor, *_PLAIN))]


def _parts(part: Any) -> list[Any]:
    """Return what a function is bound with, and what a container holds, where it is more than plain values."""
    if isinstance(part, partial):
        return [part.func, *part.args, *part.keywords.values()]
    if inspect.ismethod(part):
        return [part.__self__, part.__func__]
    if inspect.isfunction(part):
        return [*(part.__defaults__ or ())] if is_of_user(part) else []
    is_container = isinstance(part, (*_CONTAINERS, tuple))
    return [element for element in _richer(part) if not isinstance(element, Tensor)] if is_container else []


def _spaces(part: Any) -> Iterator[_Named]:
    """Yield where a function or an object keeps values: what it is bound with, attributes, globals and closures."""
    if isinstance(part, partial):
        yield "", part.keywords, None
    elif inspect.isfunction(part) or inspect.ismethod(part):
        yield from _names_of(inspect.unwrap(part))
    elif isinstance(part, list | tuple | deque | dict):
        if _richer(part):
            holder: Any = part
            keys = {str(key): key for key in (part if isinstance(part, dict) else range(len(part)))}
            # A tuple has what it has.
            changes = [getattr(holder, name, lambda *_: None) for name in ("__setitem__", "__delitem__")]
            yield "element ", _Space(holder, keys, holder.__getitem__, *changes), None
    elif not (inspect.isroutine(part) or inspect.isclass(part) or inspect.ismodule(part)) and _is_followed(part):
        if hasattr(part, "__dict__"):
            yield f"{type(part).__name__}.", part.__dict__, None
        for owner in filter(is_of_user, type(part).__mro__):
            keys = {key: key for key, value in vars(owner).items() if key[:2] != "__" and not inspect.isroutine(value)}
            read, write, remove = vars(owner).__getitem__, partial(setattr, owner), partial(delattr, owner)
            yield f"{owner.__name__}.", _Space(owner, keys, read, write, remove), None
            for method in filter(inspect.isfunction, vars(owner).values()):
                yield from _names_of(inspect.unwrap(method))


def _names_of(function: Any) -> Iterator[_Named]:
    """Yield the globals and the variables of closures that a function of the user's reads."""
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType) or not is_of_user(function):
        return
    space = function.__globals__
    yield "", space, frozenset(name for name in _names_in(code) if name in space)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        read, write, remove = partial(getattr, cell), partial(setattr, cell), partial(delattr, cell)
        yield "", _Space(cell, {name: "cell_contents"}, read, write, remove), None
    if function.__kwdefaults__:
        yield "", function.__kwdefaults__, None


def _names_in(code: CodeType) -> set[str]:
    """Return the names that code and what is defined in it look up."""
    return {*code.co_names}.union(*[_names_in(inner) for inner in code.co_consts if isinstance(inner, CodeType)])


def _is_followed(part: Any) -> bool:
    """Say whether an object is a user's, or one of a library that is to hold what a user puts there."""
    kind = type(part)
    return is_of_user(part) or kind.__module__ == "types" or dataclasses.is_dataclass(kind)
