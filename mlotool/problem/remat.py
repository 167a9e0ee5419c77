"""Which blocks of a problem's module are evaluated again in backward passes: its setting `remat`."""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn

from mlotool.core.arguments import require
from mlotool.core.messages import did_you_mean
from mlotool.core.rematerialization import RematerializedModule

AUTO = "auto"

_log = logging.getLogger("mlotool")


def rematerialize(problem: str, module: nn.Module, setting: str | Sequence[str]) -> RematerializedModule:
    """Return what runs a problem's module in its place, and log which blocks `auto` has found.

    Args:
        problem: its name.
        module: of the problem.
        setting: "auto", or paths of blocks.

    Raises:
        ConfigError: a path does not lead to a block, or there is none to find.
    """
    blocks = blocks_of(problem, module, setting)
    if setting == AUTO:
        paths = [*blocks]
        _log.info("problems.%s.remat: auto found %d blocks, %s to %s.", problem, len(paths), paths[0], paths[-1])
    return RematerializedModule(module, list(blocks.values()))


def blocks_of(problem: str, module: nn.Module, setting: str | Sequence[str]) -> dict[str, nn.Module]:
    """Return the blocks of a module by path, each once.

    Args:
        problem: its name, for messages.
        module: of the problem.
        setting: "auto"; or one path, or several, in which `*` is any text within one name. `blocks.*` are the children
            of `blocks`, but not theirs.

    Raises:
        ConfigError: a path does not lead to a block, or there is none to find.

    Example:
        >>> net = nn.Sequential(nn.Linear(1, 1), nn.TransformerEncoderLayer(4, 2), nn.TransformerEncoderLayer(4, 2))
        >>> list(blocks_of("model", net, "auto")), list(blocks_of("model", net, ["[12].self_*"]))
        (['1', '2'], ['1.self_attn', '2.self_attn'])
    """
    key, name = f"problems.{problem}.remat", type(module).__name__
    if setting == AUTO:
        blocks = dict(_repeated(module, ""))
        expected = f"auto with repeated blocks in an nn.ModuleList or nn.Sequential of {name}"
        require(bool(blocks), key, AUTO, expected, "Write paths of submodules.")
    else:
        blocks = dict[str, nn.Module]()
        submodules = {path: block for path, block in module.named_modules(remove_duplicate=False) if path}
        for pattern in [setting] if isinstance(setting, str) else setting:
            matched = {path: block for path, block in submodules.items() if _matches(path, pattern)}
            expected = f"a path of submodules of {name}, in which * is any text within one name"
            hint = f"Correct the path, or write auto.{did_you_mean(pattern, [AUTO, *submodules])}"
            require(bool(matched), key, pattern, expected, hint)
            listed = next((path for path, block in matched.items() if not _has_forward(block)), None)
            expected = f"modules with a forward of their own, unlike '{listed}'"
            require(listed is None, key, pattern, expected, f"Write '{listed}.*' for those inside it.")
            blocks |= matched
    once: dict[int, tuple[str, nn.Module]] = {}
    for path, block in blocks.items():
        once.setdefault(id(block), (path, block))
    return dict(once.values())


def _matches(path: str, pattern: str) -> bool:
    names, parts = path.split("."), pattern.split(".")
    return len(names) == len(parts) and all(map(fnmatchcase, names, parts))


def _repeated(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield repeated blocks by path: several children of one class in a list or a sequence, the outermost such ones.

    In a list, which is there for repetition, one is enough: a network of one layer needs no other setting. Sequences of
    blocks one after the other, such as the stages of a ResNet, are no blocks themselves.
    """
    children = {name: value for name, value in module._modules.items() if value is not None}
    counts = Counter(type(value) for value in children.values() if _is_block(value))
    least = 1 if isinstance(module, nn.ModuleList) else 2 if isinstance(module, nn.Sequential) else len(children) + 1
    for name, value in children.items():
        is_block = counts[type(value)] >= least and _is_block(value)
        if is_block and type(value) is not nn.Sequential:
            yield f"{prefix}{name}", value
            continue
        inside = list(_repeated(value, f"{prefix}{name}."))
        yield from inside or ([(f"{prefix}{name}", value)] if is_block else [])


def _is_block(module: nn.Module) -> bool:
    """Return whether evaluating it again can save anything: a single layer keeps little but its input."""
    is_layer = type(module).__module__.startswith("torch.nn.") and not any(True for _ in module.children())
    return _has_forward(module) and not is_layer and any(True for _ in module.parameters())


def _has_forward(module: nn.Module) -> bool:
    # ModuleList and ModuleDict have none; subclasses of them may.
    return getattr(module.forward, "__func__", None) is not nn.Module.forward
