"""What evaluating a loss changes that a trace would fix: Python's numbers, global random numbers, frozen parameters."""

import random
from typing import Any

import numpy

from mlotool.core.user_code import is_of_user
from mlotool.fusion.errors import NotFusedError
from mlotool.program import Program

_PLAIN = (bool, int, float, complex, str, type(None))


class PythonState:
    """The state of a program beside its parameters and buffers, before its losses are evaluated.

    Numbers and texts are looked at in the attributes of modules and losses that are the user's.

    Args:
        program: the member.
    """

    def __init__(self, program: Program) -> None:
        problems = program.engine.problems
        owners = [
            (f"problems.{each.name}", holder) for each in problems for holder in (*each.submodules, *_parts(each.loss))
        ]
        self._owners = [(name, owner) for name, owner in owners if is_of_user(owner) and hasattr(owner, "__dict__")]
        self._attributes = [_plain(owner) for _, owner in self._owners]
        modules = [(f"problems.{each.name}", module) for each in problems for module in each.submodules]
        self._frozen = [
            (name, parameter, parameter.detach().clone())
            for name, module in modules
            for parameter in module._parameters.values()
            if parameter is not None and not parameter.requires_grad
        ]
        self._numpy, self._python = numpy.random.get_state(), random.getstate()

    def check(self) -> None:
        """Raise a NotFusedError if something has changed."""
        change = self._change()
        if change is not None:
            raise NotFusedError(change)

    def restore(self) -> None:
        """Put all of it back."""
        for (_, owner), before in zip(self._owners, self._attributes, strict=True):
            for key in _plain(owner):
                if key not in before:
                    del owner.__dict__[key]
            owner.__dict__.update(before)
        for _, parameter, copy in self._frozen:
            parameter.data.copy_(copy)
        numpy.random.set_state(self._numpy)
        random.setstate(self._python)

    def _change(self) -> str | None:
        for (name, owner), before in zip(self._owners, self._attributes, strict=True):
            now = _plain(owner)
            changed = next((key for key in now if key not in before or now[key] != before[key]), None)
            if changed is not None:
                return f"{name}: evaluating its loss changes {type(owner).__name__}.{changed}, which a trace would fix"
        for name, parameter, copy in self._frozen:
            if not parameter.detach().equal(copy):
                return f"{name}: evaluating its loss moves a frozen parameter, which a trace would fix"
        state: Any = numpy.random.get_state()
        known: Any = self._numpy
        if state[2] != known[2] or not (state[1] == known[1]).all() or random.getstate() != self._python:
            return "a loss draws from numpy's or Python's global random numbers"
        return None


def _parts(loss: Any) -> list[Any]:
    """Return a loss and what it was bound with."""
    function = getattr(loss, "func", loss)
    return [function, getattr(function, "__self__", None), *getattr(loss, "keywords", {}).values()]


def _plain(owner: Any) -> dict[str, Any]:
    return {key: value for key, value in owner.__dict__.items() if isinstance(value, _PLAIN)}
