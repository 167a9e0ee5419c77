"""Which layers of a module are solved by multigrid: those that are named, or runs of equal blocks."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from torch import nn

from mlotool.core.errors import ConfigError
from mlotool.core.messages import did_you_mean
from mlotool.layerparallel.multigrid.layers import Layers, WholeLayers
from mlotool.layerparallel.multigrid.residual import MultigridResidual

_NAME = re.compile(r"(?P<path>[^\[\]]*)(\[(?P<begin>-?\d*):(?P<end>-?\d*)\])?")
_CONTAINERS = (nn.Sequential, nn.ModuleList)


@dataclass(frozen=True)
class Part:
    """Layers of a module.

    Args:
        blocks: modules that are called one after the other; or one that is all layers.
        layers: the same as `Layers`, or as a `MultigridResidual` whose settings do not count.

    Example:
        >>> module = nn.Sequential(nn.Linear(2, 2), *[nn.Sequential(nn.Tanh()) for _ in range(6)])
        >>> [part] = find_parts(module, "[1:]").values()
        >>> len(part.blocks), part.layers.num_layers
        (6, 6)
    """

    blocks: Sequence[nn.Module]
    layers: nn.Module


def find_parts(module: nn.Module, names: str | Sequence[str] | None) -> dict[str, Part]:
    """Return the parts of a module by name.

    Args:
        module: what the layers are in.
        names: of a module of `Layers`, of a `MultigridResidual`, of an nn.Sequential or nn.ModuleList of blocks, or of
            some of its blocks, as in "layer3[1:]"; or several of these. None looks for the first two kinds, then for
            one that is called "residual", then for runs of equal blocks.

    Raises:
        ConfigError: there is no such part, or two have a block in common.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(*[nn.Sequential(nn.Linear(3, 3)) for _ in range(5)]))
        >>> list(find_parts(model, None)), list(find_parts(model, ["1[:2]", "1[2:]"]))
        (['1'], ['1[:2]', '1[2:]'])
    """
    if names is not None:
        given = [names] if isinstance(names, str) else list(names)
        found = [(name, _named(module, name)) for name in given]
        _check_apart(found)
        return dict(found)
    modules = dict(module.named_modules())
    whole = {path: each for path, each in modules.items() if isinstance(each, MultigridResidual | Layers)}
    if whole:
        return {path: _whole(each) for path, each in whole.items() if not _is_inside(path, whole)}
    if isinstance(modules.get("residual"), _CONTAINERS):
        return {"residual": _named(module, "residual")}
    runs = {name: Part(blocks, WholeLayers(blocks)) for name, blocks in equal_blocks(module).items()}
    if not runs:
        raise ConfigError(
            f"part: found no equal blocks that follow each other in {type(module).__name__}, and no "
            f"mlotool.models.ResidualLayers; expected residual blocks that keep the shape. {_advice(module)}"
        )
    return runs


def equal_blocks(module: nn.Module) -> dict[str, list[nn.Module]]:
    """Return runs of at least two equal blocks in the module's Sequentials and ModuleLists, by name, outermost first.

    Blocks are equal if they print the same and have parameters and buffers of the same shapes. Layers of one operation,
    such as nn.Linear, are no blocks.

    Args:
        module: what they are in.

    Example:
        >>> blocks = [nn.Sequential(nn.Linear(width, 3)) for width in (2, 3, 3)]
        >>> list(equal_blocks(nn.Sequential(*blocks)))
        ['[1:3]']
    """
    found: dict[str, list[nn.Module]] = {}
    inside: set[str] = set()
    for path, each in module.named_modules():
        if not isinstance(each, _CONTAINERS) or path in inside or _is_inside(path, inside):
            continue
        position = 0
        for _, group in groupby(each, key=_kind):
            blocks, begin = list(group), position
            position += len(blocks)
            if len(blocks) > 1 and _is_block(blocks[0]):
                found[path if len(blocks) == len(each) else f"{path}[{begin}:{position}]"] = blocks
                names = [name for name, _ in each.named_children()][begin:position]
                inside |= {f"{path}.{name}".lstrip(".") for name in names}
    return found


def _is_block(module: nn.Module) -> bool:
    return any(True for _ in module.children()) and any(True for _ in module.parameters())


def _kind(block: nn.Module) -> object:
    tensors = [*block.named_parameters(), *block.named_buffers()]
    return type(block), repr(block), [(name, each.shape, each.dtype) for name, each in tensors]


def _named(module: nn.Module, name: str) -> Part:
    match = _NAME.fullmatch(name)
    child = None if match is None else dict(module.named_modules()).get(match["path"])
    if match is None or child is None:
        hint = did_you_mean(name, [path for path, _ in module.named_modules()])
        raise ConfigError(
            f"part: found '{name}', which {type(module).__name__} has not; expected the name of a module in it, or of "
            f"some of its blocks, as in layer3[1:].{hint} {_advice(module)}"
        )
    is_whole = isinstance(child, MultigridResidual | Layers)
    if is_whole and name == match["path"]:
        return _whole(child)
    if is_whole or not isinstance(child, _CONTAINERS):
        raise ConfigError(
            f"part: found {type(child).__name__} at '{name}' in {type(module).__name__}; expected an nn.Sequential or "
            f"nn.ModuleList of blocks that keep the shape, or mlotool.models.ResidualLayers. {_advice(module)}"
        )
    blocks = list(child)
    if name != match["path"]:
        begin, end = (int(match[key]) if match[key] else None for key in ("begin", "end"))
        blocks = blocks[begin:end]
    if not blocks:
        raise ConfigError(
            f"part: found no blocks at '{name}', of {len(child)} in {match['path'] or type(module).__name__}; expected "
            "at least one. Correct the numbers."
        )
    return Part(blocks, WholeLayers(blocks))


def _whole(layers: Any) -> Part:
    # Its own settings are those of a module that is used by itself.
    own = layers.serial().layers if isinstance(layers, MultigridResidual) else layers
    return Part([layers], own)


def _check_apart(parts: Sequence[tuple[str, Part]]) -> None:
    """Refuse parts that have a module in common."""
    owners: dict[nn.Module, str] = {}
    for name, part in parts:
        for module in dict.fromkeys(each for block in part.blocks for each in block.modules()):
            if module in owners:
                raise ConfigError(
                    f"part: found '{owners[module]}' and '{name}', which have blocks in common; expected parts that "
                    "have none. Name each block once."
                )
            owners[module] = name


def _is_inside(path: str, outer: Iterable[str]) -> bool:
    return any(path != each and path.startswith(f"{each}." if each else "") for each in outer)


def _advice(module: nn.Module) -> str:
    runs = [f"{name} ({len(blocks)} equal blocks)" for name, blocks in equal_blocks(module).items()]
    if runs:
        return f"Name one of {', '.join(runs[:8])}."
    return (
        "Build the blocks that keep the shape as one mlotool.layerparallel.MultigridResidual([block, ...]), or take "
        "parallel=auxnet, which asks nothing of blocks."
    )
