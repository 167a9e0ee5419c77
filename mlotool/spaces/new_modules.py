"""Modules that a graph gets beside those of its base."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mlotool.core.errors import ConfigError
from mlotool.spaces.building import Build, built
from mlotool.spaces.decisions import Decision, as_before
from mlotool.spaces.fitting import fitted
from mlotool.spaces.own_behaviour import check_keeps, has_own_behaviour


class NewModules:
    """Makes modules and keeps them in a model.

    Args:
        root: the model.
        seed: of their random numbers.
        anew: makes the model anew, for its own modules once more; None where nobody can.
    """

    def __init__(self, root: nn.Module, seed: int, anew: Callable[[], nn.Module] | None) -> None:
        self._root, self._seed, self._anew = root, seed, anew
        self._modes = {module: module.training for module in root.modules()}
        self._makers: dict[str, tuple[Build, dict[str, Any], torch.dtype | None]] = {}
        # By candidate, which is kept so that no other gets its number.
        self._chosen: dict[int, tuple[Build, dict[str, Decision]]] = {}
        # Of modules that the base has too: models made anew for the last copy, by name, and what they are copies of.
        self._last: tuple[str, dict[str, nn.Module]] = ("", {})
        self._origins: dict[str, str] = {}

    @property
    def paths(self) -> set[str]:
        """Those of the modules that were made."""
        return {*self._makers, *self._origins}

    def has(self, path: str) -> bool:
        """Say whether the model has something at a path."""
        found: Any = self._root
        for name in path.split("."):
            found = getattr(found, name, None)
        return found is not None

    def put(self, path: str, build: Build, settings: dict[str, Any], dtype: torch.dtype | None = None) -> str:
        """Make a module and keep it at a path, which is its name for random numbers too.

        Args:
            path: where; the modules above it are made where there are none.
            build: makes it.
            settings: of its place.
            dtype: of the numbers there; None: what it is made with.

        Returns:
            the path where it is.
        """
        before = self._root.get_submodule(path) if self.has(path) else None
        if before is not None:
            self._check_untied(path)
        self._makers[path] = (build, settings, dtype)
        self._keep_new(path, self._made(path), before)
        return path

    def _made(self, path: str, seeded_by: str | None = None) -> nn.Module:
        """Return the new module of a path, whose random numbers have that name or another one."""
        build, settings, dtype = self._makers[path]
        # A candidate that chooses in its own constructor has one answer for all of its places.
        _, made = self._chosen.setdefault(id(build), (build, {}))
        with as_before(made):
            return fitted(built(build, self._seed, seeded_by or path, settings), dtype)

    def _keep_new(self, path: str, new: nn.Module, before: nn.Module | None) -> None:
        if before is not None:
            check_keeps(path, [before], new)
        # What stands in the place of a module that the base keeps in evaluation is in evaluation as well.
        self._keep(path, new, is_training=self._modes[self._root if before is None else before])

    def put_once_more(self, path: str, name: str) -> None:
        """Make the module at a path again, with random numbers of its own, and keep it below a name.

        Args:
            path: of the module.
            name: of the copy; all modules of the base in one copy are of one model that is made anew.

        Raises:
            ConfigError: it is the base's, which nobody can make anew.
        """
        self._check_untied(path)
        new = f"{name}.{path}"
        self.hold(path, name)
        if path in self._makers:
            self.put(new, *self._makers[path])
            self._set_modes(self._root.get_submodule(new), like=self._root.get_submodule(path))
            return
        self._origins[new] = origin = self._origins.get(path, path)
        self._keep(new, self._model(path, name).get_submodule(origin))

    def restore_modes(self) -> None:
        """Put all modules into the mode that they have had before; new ones into that of what they stand for."""
        for module in self._root.modules():
            module.training = self._modes.get(module, self._modes[self._root])

    def _model(self, path: str, name: str) -> nn.Module:
        """Return the base as it was made anew for a copy.

        Raises:
            ConfigError: nobody can make it.
        """
        if self._anew is None:
            raise ConfigError(
                f"cannot make '{path}' once more, as the base was given as a module; expected a function that makes "
                "it. Write Space(lambda: MyModel(..), ..)."
            )
        if name != self._last[0]:
            self._last = name, {}
        # A block that holds a layer and copies of it has a model for each.
        above = path.removesuffix(self._origins.get(path, path))
        models, key = self._last[1], f"{name}.{above}".rstrip(".")
        if key not in models:
            models[key] = built(self._anew, self._seed, key, {})
        return models[key]

    def hold(self, path: str, name: str) -> None:
        """Make the modules above a copy, of the same class where that does more than to hold others.

        Args:
            path: of what is copied.
            name: of the copy.
        """
        names = path.split(".")[:-1]
        for depth in range(len(names)):
            above = ".".join(names[: depth + 1])
            original, new = self._root.get_submodule(above), f"{name}.{above}"
            if self.has(new):
                continue
            if not has_own_behaviour(original):
                self._keep(new, nn.Module(), is_training=self._modes.get(original, True))
                continue
            self._origins[new] = origin = self._origins.get(above, above)
            holder = copy.copy(self._model(above, name).get_submodule(origin))
            holder._parameters, holder._buffers, holder._modules = {}, {}, {}
            self._keep(new, holder)

    def _set_modes(self, module: nn.Module, like: nn.Module) -> None:
        for each, other in zip(module.modules(), like.modules(), strict=True):
            self._modes[each] = self._modes[other]

    def _check_untied(self, path: str) -> None:
        """Refuse a module whose parameters another one has as well: a new one would have its own."""
        own = [id(each) for each in self._root.get_submodule(path).parameters()]
        if not own:
            return
        names = dict(self._root.named_parameters(remove_duplicate=False))
        inside = {id(tensor): name for name, tensor in names.items() if name.startswith(f"{path}.")}
        for name, tensor in names.items():
            if not name.startswith(f"{path}.") and id(tensor) in inside:
                raise ConfigError(
                    f"'{path}' shares '{inside[id(tensor)]}' with '{name}', and a new module would not; expected "
                    "modules whose parameters are their own. Write another path, or make a leaf of what holds both."
                )

    def _keep(self, path: str, module: nn.Module, *, is_training: bool = True) -> None:
        self._modes |= {each: each.training and is_training for each in module.modules()}
        *above, last = path.split(".")
        parent = self._root
        for name in above:
            if not hasattr(parent, name):
                parent.add_module(name, nn.Module())
            parent = getattr(parent, name)
        for each in module.modules():
            # Not by `eval`, which may be a class's own, and want modules that come later.
            each.training = False
        parent.add_module(last, module)
