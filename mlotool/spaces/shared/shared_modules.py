"""Modules of a shared space: each candidate of each place once, beside what stands there."""

from collections.abc import Callable
from itertools import chain, count
from typing import Any

import torch
from torch import nn

from mlotool.spaces.building import Build, accepted
from mlotool.spaces.new_modules import NewModules
from mlotool.spaces.shared.path_table import Condition

MARK = "@"
"""Stands between the path of what is replaced and the candidate, in the path of a new module."""


class SharedModules(NewModules):
    """Makes modules beside each other that a space would put in one another's place.

    Equal ones are one: those of the same candidate with the same settings at the same path.

    Args:
        root: the model.
        seed: of their random numbers.
        anew: makes the model anew, for its own modules once more; None where nobody can.

    Attributes:
        condition: decisions by which a module that is made now is read.
    """

    def __init__(self, root: nn.Module, seed: int, anew: Callable[[], nn.Module] | None) -> None:
        super().__init__(root, seed, anew)
        self.condition: Condition = ()
        self._untied: set[str] = set()
        self._places: dict[tuple[Any, ...], str] = {}
        self._origin: dict[str, str] = {}

    def put(self, path: str, build: Build, settings: dict[str, Any], dtype: torch.dtype | None = None) -> str:
        """Make a module, with the random numbers that a space's has, and keep it at the path or beside it."""
        key = (path, id(build), repr(sorted(accepted(build, settings).items())), dtype)
        if key in self._places:
            return self._places[key]
        before = self._root.get_submodule(path) if self.has(path) else None
        if before is not None and path not in self._makers and path not in self._untied:
            self._check_untied(path)
            self._untied.add(path)
        new = self._beside(path)
        self._makers[new] = (build, settings, dtype)
        self._origin[new] = path
        self._keep_new(new, self._made(new, path), before)
        self._places[key] = new
        return new

    def put_once_more(self, path: str, name: str) -> None:
        """Make the module at a path again below a name, with the random numbers that a space's copy has."""
        if path not in self._origin:
            super().put_once_more(path, name)
            return
        self.hold(path, name)
        new = f"{name}.{path}"
        self._makers[new] = self._makers[path]
        self._origin[new] = f"{name}.{self._origin[path]}"
        self._keep_new(new, self._made(new, self._origin[new]), None)
        self._set_modes(self._root.get_submodule(new), like=self._root.get_submodule(path))

    def name_in_space(self, path: str) -> str:
        """Return the path that a module has in a space that has decided for it."""
        return self._origin.get(path, path)

    def _beside(self, path: str) -> str:
        values = [str(value) for _, value in self.condition]
        names = [path, *(f"{path}{MARK}{','.join(values[-last:])}" for last in range(1, len(values) + 1))]
        more = (f"{names[-1]},{number}" for number in count(2))
        return next(each for each in chain(names, more) if not self.has(each))
