"""What a space refuses before it begins: wrong settings, and bases of which it would lose something."""

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from mlotool.core.errors import ConfigError
from mlotool.core.messages import did_you_mean, shown
from mlotool.spaces.bases import own_methods
from mlotool.spaces.mutators.mutator import AbstractMutator
from mlotool.spaces.tracing import WHOLE, matches

_OWN_NAMES = {
    *("decisions", "changes", "nodes", "_own_type", "_arguments", "_is_rewired", "_fixed", "_run"),
    *("table", "paths", "_path", "_origins", "_draws"),
}

MAX_PATHS = 8
"""Of a base's modules, those that a message names."""


def check_settings(mutators: Sequence[AbstractMutator], inputs: Sequence[Any] | None, leaves: Sequence[str]) -> None:
    """Refuse settings of another kind, and missing inputs."""
    if not isinstance(mutators, Sequence):
        raise ConfigError(f"mutators: found {type(mutators).__name__}; expected a list. Write mutators: [..].")
    for mutator in mutators:
        if not isinstance(mutator, AbstractMutator):
            raise ConfigError(
                f"mutators: found {type(mutator).__name__}; expected mutators, such as mlotool.spaces.Operator, or a "
                "subclass of mlotool.spaces.AbstractMutator. Correct the list."
            )
    if isinstance(leaves, str) or not all(isinstance(each, str) for each in leaves):
        example = shown([leaves] if isinstance(leaves, str) else ["blocks.*"])
        raise ConfigError(f"leaves: found {shown(leaves)}; expected a list of paths. Write leaves: {example}.")
    if not isinstance(inputs, Sequence | None) or isinstance(inputs, str):
        raise ConfigError(
            f"inputs: found {shown(inputs)}; expected a shape without the batch. Write inputs: [1, 8, 8]."
        )
    if inputs is None:
        raise ConfigError(
            "inputs: missing; expected the shape of what the model is called with, without the batch, as its graph is "
            "compared with it. Write inputs: ${data.image_shape}."
        )


def check_leaves(base: nn.Module, leaves: Sequence[str]) -> None:
    """Refuse a leaf that is none of the base's modules."""
    paths = [path for path, _ in base.named_modules() if path]
    # A base may be without a part by its own settings: `down` is None, `blocks` of `blocks.*.norm` an empty list.
    none = [f"{path}.{name}".lstrip(".") for path, module in base.named_modules() for name in _absent(module)]
    lists = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
    empty = [path for path, module in base.named_modules() if isinstance(module, lists) and not len(module)]
    for pattern in () if WHOLE in leaves else leaves:
        names = pattern.split(".")
        above = [".".join(names[:count]) for count in range(1, len(names)) if "*" in names[count]]
        is_absent = any(matches(path, each) for path in empty for each in above)
        if not is_absent and not any(matches(path, pattern) for path in paths + none):
            some = ", ".join(paths[:MAX_PATHS]) + (", .." if len(paths) > MAX_PATHS else "")
            raise ConfigError(
                f"leaves: found {shown(pattern)}, which is no module of {type(base).__name__}; expected paths such as "
                f"{some or WHOLE}.{did_you_mean(pattern, paths)} Correct the path, or remove it."
            )


def _absent(module: nn.Module) -> list[str]:
    every = {**module._modules, **vars(module)}
    return [name for name, value in every.items() if value is None and name[0] != "_"]


def check_base(base: nn.Module) -> None:
    """Refuse what is no module, and modules whose parameters have no shape yet."""
    if not isinstance(base, nn.Module):
        raise ConfigError(
            f"base: found {type(base).__name__}; expected a module, or a function that makes one. Correct it."
        )
    for path, module in base.named_modules():
        if any(map(is_lazy, module.parameters(recurse=False))):
            raise ConfigError(
                f"base: found the lazy module '{path}', whose parameters have no shape yet; expected shapes that are "
                f"known. Write {type(module).__name__.removeprefix('Lazy')} with its sizes."
            )


def check_own_names(base: nn.Module) -> None:
    """Refuse a base of which a space would lose something without a word."""
    changed = own_methods(base)
    if changed:
        raise ConfigError(
            f"base: found {type(base).__name__}.{changed[0]}, which a space has from torch.nn.Module; expected a model "
            "that leaves it as it is, or does so in a module inside it. Write leaves: ['.'], which makes one node of "
            "the whole model, or a model without it."
        )
    kept = {*vars(base), *base._modules, *base._parameters, *base._buffers}
    taken = sorted(kept & _OWN_NAMES)
    if taken:
        raise ConfigError(
            f"base: found {type(base).__name__} with an attribute '{taken[0]}', which a space has for itself; expected "
            "another name. Rename it, or write leaves: ['.'], which makes one node of the whole model."
        )
