"""New modules of a model: their initial values depend on the seed and on the node's id alone."""

import hashlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Size, nn

from mlotool.core.errors import ConfigError
from mlotool.core.faults import shown

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
        module = build(**_accepted(build, settings))
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
    brings another `kernel_size` and no `padding` gets the padding that keeps the size, where the one before has such.

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


def input_sizes(before: Size) -> dict[str, Any]:
    """Return the sizes of what goes in, by torch's names of arguments."""
    return {"in_channels": before[0], "num_inputs": before[0], "in_features": before[-1]}


def _accepted(build: Build, settings: Mapping[str, Any]) -> dict[str, Any]:
    try:
        parameters = inspect.signature(build).parameters.values()
    except (TypeError, ValueError):
        return {}
    if getattr(build, "takes_settings", False):
        return dict(settings)
    named = {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    # What functools.partial has bound is not to be changed.
    bound: Mapping[str, Any] = getattr(build, "keywords", {})
    found = {name: value for name, value in settings.items() if name in named - set(bound)}
    if "kernel_size" in bound and isinstance(found.get("padding"), int | tuple):
        found.pop("padding")
        found |= _same_padding(settings, bound)
    return found


def _same_padding(settings: Mapping[str, Any], bound: Mapping[str, Any]) -> dict[str, Any]:
    """Return the padding by which a new kernel keeps the size of images, where that before it does; else none."""
    kernel, padding, dilation = (_sizes(settings.get(name, 1)) for name in ("kernel_size", "padding", "dilation"))
    new_kernel, new_dilation = _sizes(bound["kernel_size"]), _sizes(bound.get("dilation", settings.get("dilation", 1)))
    if not all(type(each) is int for each in (*kernel, *padding, *dilation, *new_kernel, *new_dilation)):
        return {}
    keeps_size = all(2 * p == d * (k - 1) for k, p, d in zip(kernel, padding, dilation, strict=False))
    doubled = [d * (k - 1) for k, d in zip(new_kernel, new_dilation, strict=False)][: len(padding)]
    can_keep = keeps_size and all(each % 2 == 0 for each in doubled)
    return {"padding": tuple(each // 2 for each in doubled)} if can_keep else {}


def _sizes(value: Any) -> tuple[Any, ...]:
    """Return a setting for each of at most three sizes of an image."""
    return value if isinstance(value, tuple) else (value,) * 3
