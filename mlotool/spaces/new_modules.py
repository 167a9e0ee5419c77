"""Modules that a graph gets beside those of its base."""

from collections.abc import Callable
from typing import Any

from torch import nn

from mlotool.core.errors import ConfigError
from mlotool.spaces.building import Build, built


class NewModules:
    """Makes modules and keeps them in a model.

    Args:
        root: the model.
        seed: of their random numbers.
        anew: makes the model anew, for its own modules once more; None where nobody can.
    """

    def __init__(self, root: nn.Module, seed: int, anew: Callable[[], nn.Module] | None) -> None:
        self._root, self._seed, self._anew = root, seed, anew
        self._makers: dict[str, tuple[Build, dict[str, Any]]] = {}
        # Of modules that the base has too: models made anew by the copy's name, and what they are copies of.
        self._models: dict[str, nn.Module] = {}
        self._origins: dict[str, str] = {}

    def has(self, path: str) -> bool:
        """Say whether the model has something at a path."""
        found: Any = self._root
        for name in path.split("."):
            found = getattr(found, name, None)
        return found is not None

    def put(self, path: str, build: Build, settings: dict[str, Any]) -> None:
        """Make a module and keep it at a path, which is its name for random numbers too.

        Args:
            path: where; the modules above it are made where there are none.
            build: makes it.
            settings: of its place.
        """
        if self.has(path):
            self._check_untied(path)
        self._makers[path] = (build, settings)
        self._keep(path, built(build, self._seed, path, settings))

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
        if path in self._makers:
            self.put(new, *self._makers[path])
            return
        if self._anew is None:
            raise ConfigError(
                f"cannot make '{path}' once more, as the base was given as a module; expected a function that makes "
                "it. Write Space(lambda: MyModel(..), ..)."
            )
        if name not in self._models:
            self._models[name] = built(self._anew, self._seed, name, {})
        self._origins[new] = origin = self._origins.get(path, path)
        self._keep(new, self._models[name].get_submodule(origin))

    def _check_untied(self, path: str) -> None:
        """Refuse a module whose parameters another one has as well: a new one would have its own."""
        names = dict(self._root.named_parameters(remove_duplicate=False))
        inside = {id(tensor): name for name, tensor in names.items() if name.startswith(f"{path}.")}
        for name, tensor in names.items():
            if not name.startswith(f"{path}.") and id(tensor) in inside:
                raise ConfigError(
                    f"'{path}' shares '{inside[id(tensor)]}' with '{name}', and a new module would not; expected "
                    "modules whose parameters are their own. Write another path, or make a leaf of what holds both."
                )

    def _keep(self, path: str, module: nn.Module) -> None:
        *above, last = path.split(".")
        parent = self._root
        for name in above:
            if not hasattr(parent, name):
                parent.add_module(name, nn.Module())
            parent = getattr(parent, name)
        parent.add_module(last, module.eval())
