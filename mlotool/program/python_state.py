"""What evaluating a loss changes that a trace would fix: Python's numbers, global random numbers, frozen parameters."""

import copy
import random
from collections import deque
from collections.abc import Sequence
from itertools import chain
from operator import is_, itemgetter
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from mlotool.problem.problem import Problem
from mlotool.program.python_places import Place, is_plain, is_watched, namespaces, places

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
