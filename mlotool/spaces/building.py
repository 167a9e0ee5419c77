"""New modules of a model: their initial values depend on the seed and on the node's id alone."""

import copy
import hashlib
import inspect
import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Size, Tensor, fx, nn

from mlotool.core.arguments import require
from mlotool.core.errors import ConfigError, InfeasibleModelError, RefusedError, RefusedModelError
from mlotool.core.messages import shown
from mlotool.core.user_code import is_refusal, named
from mlotool.spaces.decisions import Decision, as_before
from mlotool.spaces.shapes import VALUE

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

# Makes a module. It is given those of its place's settings that it has arguments for (see `settings_of`).
Build = Callable[..., nn.Module]


def built(build: Build, seed: int, name: str, settings: Mapping[str, Any]) -> nn.Module:
    """Return a new module, whose random numbers are those of a seed and a name.

    Args:
        build: makes it.
        seed: of the space.
        name: id of the node.
        settings: what the place would have it made with; it gets those that it has arguments for.

    Raises:
        ConfigError: what is made is no module, or nothing can be made.
        InfeasibleModelError: the constructor refuses what its place gives it.
    """
    is_right, key = callable(build) and not isinstance(build, nn.Module), f"node '{name}': the candidate"
    expected = (
        "a function that makes a module, such as torch.nn.Tanh or partial(torch.nn.Conv2d, kernel_size=5), or null"
    )
    require(is_right, key, build, expected)
    with torch.random.fork_rng(devices=[]):
        # Of the CPU alone where modules are made there: `torch.manual_seed` takes a millisecond for other devices.
        is_on_cpu = torch.get_default_device().type in ("cpu", "meta")
        seeded = torch.default_generator.manual_seed if is_on_cpu else torch.manual_seed
        seeded(_digest(f"{seed}/{name}"))
        try:
            module = build(**accepted(build, settings))
        except (InfeasibleModelError, RefusedError) as error:
            kind = type(error) if isinstance(error, InfeasibleModelError) else RefusedModelError
            raise kind(f"node '{name}': {error}") from error
        except Exception as error:
            if not is_refusal(error):
                raise
            bound = "".join(f", {key}={shown(value)}" for key, value in getattr(build, "keywords", {}).items())
            fault = f"node '{name}': {named(build)}{bound and f'{bound},'} does not accept the settings of its place"
            advice = "Correct the candidate, or take another one there."
            raise RefusedModelError(f"{fault}: {type(error).__name__}: {error}. {advice}") from error
    require(isinstance(module, nn.Module), key, module, "one that makes a module")
    return module


def seed_at(seed: int, place: str) -> int:
    """Return the seed of a space at a place of a module; the module itself, whose place is "", has the seed as it is.

    Example:
        >>> seed_at(3, ""), seed_at(3, "left") == seed_at(3, "right")
        (3, False)
    """
    return _digest(f"{seed}/{place}/") if place else seed


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def settings_of(module: nn.Module | None, before: Size | None, after: Size | None) -> dict[str, Any]:
    """Return what a module at a place would be made with, by torch's names of arguments.

    Those are the settings of the module that stands there (`stride`, `padding`, `bias`, ..), and sizes:
    `in_channels`, `out_channels`, `num_features`, `num_channels` and `width` from the first entry of a shape,
    `in_features`, `out_features`, `normalized_shape`, `embed_dim` and `d_model` from the last one. A candidate that
    brings another `kernel_size` or `dilation` and no `padding` gets the padding that keeps the size, where the one
    before has such (see `taken`).

    Args:
        module: that stands there; None for a function.
        before: shape of what goes in, without the batch; None where it is not known.
        after: shape of what comes out.

    Example:
        >>> found = settings_of(nn.Conv2d(3, 8, 5, bias=False), Size([3, 9, 9]), Size([8, 5, 5]))
        >>> found["kernel_size"], found["bias"], found["out_channels"]
        ((5, 5), False, 8)
    """
    settings: dict[str, Any] = {}
    if before:
        settings |= input_sizes(before) | dict.fromkeys(("embed_dim", "d_model"), before[-1])
    if after:
        settings |= dict.fromkeys(("out_channels", "num_outputs", "num_features", "num_channels", "width"), after[0])
        settings |= dict.fromkeys(("out_features", "normalized_shape"), after[-1])
    if before and after and len(before) == len(after) == 3 and after[1] and before[1] % after[1] == 0:
        settings["stride"] = before[1] // after[1]
    if module is not None:
        plain = (int, float, str, tuple)
        settings |= {name: value for name, value in vars(module).items() if name[0] != "_" and isinstance(value, plain)}
        settings.pop("training", None)
        if "bias" in module._parameters:
            settings["bias"] = module.bias is not None
    return settings


def input_sizes(before: Size) -> dict[str, Any]:
    """Return the sizes of what goes in, by torch's names of arguments."""
    return {"in_channels": before[0], "num_inputs": before[0], "in_features": before[-1]}


def taken(settings: Mapping[str, Any], names: Collection[str], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of a place's settings that a candidate takes: what it has arguments for, and does not say itself.

    With another kernel or another dilation, it gets the padding that keeps the size of images, where that before does;
    else none.

    Args:
        settings: of the place.
        names: of the candidate's arguments.
        own: the values that it brings.

    Example:
        >>> taken({"kernel_size": 3, "padding": 1, "stride": 1}, ["kernel_size", "padding"], {"kernel_size": 5})
        {'padding': 2}
    """
    accepted = {name: value for name, value in settings.items() if name in names and name not in own}
    if not isinstance(accepted.get("padding"), int | tuple):
        return accepted
    # A candidate without an argument for its kernel may have any; one without a dilation has none.
    before, now = _reach(settings), _reach({"kernel_size": settings.get("kernel_size", 1)} | accepted | dict(own))
    if before is not None and now is not None and all(map(operator.eq, before, now)):
        return accepted
    padding = accepted.pop("padding")
    if before is not None and now is not None:
        keeps_size = all(2 * pad == reach for pad, reach in zip(_sizes(padding), before, strict=False))
        if keeps_size and all(reach % 2 == 0 for reach in now):
            fitting = tuple(reach // 2 for reach in now)[: len(_sizes(padding))]
            is_one = isinstance(padding, int) and len(set(fitting)) == 1
            accepted["padding"] = fitting[0] if is_one else fitting
    return accepted


def accepted(build: Build, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of a place's settings that a candidate is made with.

    Args:
        build: makes it.
        settings: of the place.

    Example:
        >>> accepted(nn.Linear, {"in_features": 4, "kernel_size": 3})
        {'in_features': 4}
    """
    if getattr(build, "takes_settings", False):
        return dict(settings)
    own: dict[str, Any] = {}
    try:
        parameters = inspect.signature(build).parameters.values()
        if isinstance(build, partial):
            # What is bound, by position or by name, is not to be changed.
            own = {**inspect.signature(build.func).bind_partial(*build.args).arguments, **build.keywords}
    except (TypeError, ValueError):
        return {}
    return taken(settings, {parameter.name for parameter in parameters if parameter.kind in _NAMED}, own)


def _reach(settings: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return how far a kernel reaches beyond one value, for each size of an image; None where it is not known."""
    kernel, dilation = (_sizes(settings.get(name, 1)) for name in ("kernel_size", "dilation"))
    if not all(type(size) is int for size in (*kernel, *dilation)):
        return None
    return tuple(many * (size - 1) for size, many in zip(kernel, dilation, strict=False))


def _sizes(value: Any) -> tuple[Any, ...]:
    """Return a setting for each of at most three sizes of an image."""
    return tuple(value) if isinstance(value, tuple | list) else (value,) * 3


def dtype_at(nodes: Iterable[fx.Node]) -> torch.dtype | None:
    """Return the type of the first of some nodes' results that is one of floating point numbers."""
    values = (node.meta.get(VALUE) for node in nodes)
    return next((value.dtype for value in values if isinstance(value, Tensor) and value.is_floating_point()), None)


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
        self._names: dict[str, str] = {}

    @property
    def paths(self) -> set[str]:
        """Those of the modules that were made."""
        return {*self._makers, *self._origins}

    def has(self, path: str) -> bool:
        """Say whether the model has something at a path."""
        value: Any = self._root
        for name in path.split("."):
            value = getattr(value, name, None)
        return value is not None

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
        if before is not None and path not in self._makers:
            self._check_untied(path)
        new = self._path_for(path)
        self._makers[new] = (build, settings, dtype)
        self._make(new, path, before)
        return new

    def _path_for(self, path: str) -> str:
        """Return where a new module is kept that stands in a path's place."""
        return path

    def name_in_space(self, path: str) -> str:
        """Return the path that a new module has in a space that has decided for it."""
        return self._names.get(path, path)

    def _make(self, path: str, name: str, before: nn.Module | None) -> None:
        """Make the new module of a path with the random numbers of a name, and keep it."""
        build, settings, dtype = self._makers[path]
        self._names[path] = name
        # A candidate that chooses in its own constructor has one answer for all of its places.
        _, made = self._chosen.setdefault(id(build), (build, {}))
        with as_before(made):
            new = built(build, self._seed, name, settings)
        new = new if dtype in (None, torch.get_default_dtype()) else new.to(dtype)
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
            self._makers[new] = self._makers[path]
            self._make(new, f"{name}.{self.name_in_space(path)}", None)
            pairs = zip(self._root.get_submodule(new).modules(), self._root.get_submodule(path).modules(), strict=True)
            self._modes |= {copied: self._modes[original] for copied, original in pairs}
            return
        self._keep(new, self._original(path, name))

    def restore_modes(self) -> None:
        """Put all modules into the mode that they have had before; new ones into that of what they stand for."""
        for module in self._root.modules():
            module.training = self._modes.get(module, self._modes[self._root])

    def hold(self, path: str, name: str) -> None:
        """Make the modules above a copy, of the same class, which may have a `train` or a state of its own.

        Args:
            path: of what is copied.
            name: of the copy.
        """
        above = path.split(".")[:-1]
        for depth in range(1, len(above) + 1):
            original = self._root.get_submodule(".".join(above[:depth]))
            new = ".".join([name, *above[:depth]])
            if not self.has(new):
                holder = copy.copy(original)
                holder._parameters, holder._buffers, holder._modules = {}, {}, {}
                holder.training = self._modes.get(original, True)
                self._keep(new, holder)

    def _original(self, path: str, name: str) -> nn.Module:
        """Return the module at a path, or what it is a copy of, from the base as it was made anew for a copy.

        Raises:
            ConfigError: nobody can make it.
        """
        if self._anew is None:
            fault = f"cannot make another '{path}', as the base was given as a module"
            raise ConfigError(f"{fault}. Give a function that makes it: Space(lambda: MyModel(..), ..).")
        if name != self._last[0]:
            self._last = name, {}
        # A block that holds a layer and copies of it has a model for each.
        origin = self._origins[f"{name}.{path}"] = self._origins.get(path, path)
        models, key = self._last[1], f"{name}.{path.removesuffix(origin)}".rstrip(".")
        if key not in models:
            models[key] = built(self._anew, self._seed, key, {})
        return models[key].get_submodule(origin)

    def _check_untied(self, path: str) -> None:
        """Refuse a module whose parameters another one has as well: a new one would have its own."""
        names = dict(self._root.named_parameters(remove_duplicate=False))
        inside = {id(tensor): name for name, tensor in names.items() if name.startswith(f"{path}.")}
        for name, tensor in names.items() if inside else ():
            if not name.startswith(f"{path}.") and id(tensor) in inside:
                fault = f"'{path}' shares '{inside[id(tensor)]}' with '{name}', which a new module would not do"
                raise ConfigError(f"{fault}. Write another path, or declare the module that contains both as a leaf.")

    def _keep(self, path: str, module: nn.Module, *, is_training: bool = True) -> None:
        self._modes |= {module: module.training and is_training for module in module.modules()}
        *above, last = path.split(".")
        parent = self._root
        for name in above:
            if not hasattr(parent, name):
                parent.add_module(name, nn.Module())
            parent = getattr(parent, name)
        for inside in module.modules():
            # Not by `eval`, which may be a class's own, and want modules that come later.
            inside.training = False
            if getattr(inside, "inplace", None) is True:
                inside.inplace = False  # type: ignore[assignment]
        parent.add_module(last, module)
