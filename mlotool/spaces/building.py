"""New modules of a model: their initial values depend on the seed and on the node's id alone."""

import hashlib
import inspect
import operator
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Size, nn

from mlotool.core.errors import ConfigError, InfeasibleModelError, RefusedError, RefusedModelError
from mlotool.core.messages import shown
from mlotool.core.user_code import is_refusal, named

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

Build = Callable[..., nn.Module]
"""Makes a module. It is given those of its place's settings that it has arguments for (see `settings_of`)."""


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
    if not callable(build):
        raise ConfigError(
            f"node '{name}': found the candidate {shown(build)}; expected what makes a module, or null. Write "
            "{_target_: torch.nn.Linear, ..}."
        )
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    with torch.random.fork_rng(devices=[]):
        # Of the CPU alone where modules are made there: `torch.manual_seed` takes a millisecond for other devices.
        is_on_cpu = torch.get_default_device().type in ("cpu", "meta")
        seeded = torch.default_generator.manual_seed if is_on_cpu else torch.manual_seed
        seeded(int.from_bytes(digest[:8], "big") >> 1)
        try:
            module = build(**accepted(build, settings))
        except (InfeasibleModelError, RefusedError) as error:
            kind = type(error) if isinstance(error, InfeasibleModelError) else RefusedModelError
            raise kind(f"node '{name}': {error}") from error
        except Exception as error:
            if not is_refusal(error):
                raise
            raise RefusedModelError(
                f"node '{name}': {_described(build)} refuses what its place gives it: {type(error).__name__}: {error}. "
                "Correct the candidate, or take another one there."
            ) from error
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"node '{name}': found {type(module).__name__} where a module is to be; expected a candidate that makes a "
            "module. Correct it."
        )
    return module


def seed_at(seed: int, place: str) -> int:
    """Return the seed of a space at a place of a module; the module itself, whose place is "", has the seed as it is.

    Example:
        >>> seed_at(3, ""), seed_at(3, "left") == seed_at(3, "right")
        (3, False)
    """
    return int.from_bytes(hashlib.sha256(f"{seed}/{place}/".encode()).digest()[:8], "big") >> 1 if place else seed


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
    found: dict[str, Any] = {}
    if before:
        found |= input_sizes(before) | dict.fromkeys(("embed_dim", "d_model"), before[-1])
    if after:
        found |= dict.fromkeys(("out_channels", "num_outputs", "num_features", "num_channels", "width"), after[0])
        found |= dict.fromkeys(("out_features", "normalized_shape"), after[-1])
    if before and after and len(before) == len(after) == 3 and after[1] and before[1] % after[1] == 0:
        found["stride"] = before[1] // after[1]
    if module is not None:
        plain = (int, float, str, tuple)
        found |= {name: value for name, value in vars(module).items() if name[0] != "_" and isinstance(value, plain)}
        found.pop("training", None)
        if "bias" in module._parameters:
            found["bias"] = module.bias is not None
    return found


def _described(build: Build) -> str:
    """Return what makes a module, with what a partial has bound."""
    bound = ", ".join(f"{key}={shown(value)}" for key, value in getattr(build, "keywords", {}).items())
    return f"{named(build)}, {bound}," if bound else named(build)


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
    found = {name: value for name, value in settings.items() if name in names and name not in own}
    if not isinstance(found.get("padding"), int | tuple):
        return found
    # A candidate without an argument for its kernel may have any; one without a dilation has none.
    before, now = _reach(settings), _reach({"kernel_size": settings.get("kernel_size", 1)} | found | dict(own))
    if before is not None and now is not None and all(map(operator.eq, before, now)):
        return found
    padding = found.pop("padding")
    if before is not None and now is not None:
        keeps_size = all(2 * each == reach for each, reach in zip(_sizes(padding), before, strict=False))
        if keeps_size and all(each % 2 == 0 for each in now):
            fitting = tuple(each // 2 for each in now)[: len(_sizes(padding))]
            is_one = isinstance(padding, int) and len(set(fitting)) == 1
            found["padding"] = fitting[0] if is_one else fitting
    return found


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
    try:
        parameters = inspect.signature(build).parameters.values()
        own = _bound(build)
    except (TypeError, ValueError):
        return {}
    return taken(settings, {each.name for each in parameters if each.kind in _NAMED}, own)


def _bound(build: Build) -> dict[str, Any]:
    """Return what functools.partial has bound, by position or by name: it is not to be changed."""
    if not isinstance(build, partial):
        return {}
    return {**inspect.signature(build.func).bind_partial(*build.args).arguments, **build.keywords}


def _reach(settings: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return how far a kernel reaches beyond one value, for each size of an image; None where it is not known."""
    kernel, dilation = (_sizes(settings.get(name, 1)) for name in ("kernel_size", "dilation"))
    if not all(type(each) is int for each in (*kernel, *dilation)):
        return None
    return tuple(many * (size - 1) for size, many in zip(kernel, dilation, strict=False))


def _sizes(value: Any) -> tuple[Any, ...]:
    """Return a setting for each of at most three sizes of an image."""
    return tuple(value) if isinstance(value, tuple | list) else (value,) * 3
