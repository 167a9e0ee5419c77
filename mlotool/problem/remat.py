"""Which blocks of a problem's module are evaluated again in backward passes: its setting `remat`."""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from mlotool.core.errors import ConfigError
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
        _log.info("problems.%s.remat: auto found %s.", problem, _described(blocks))
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
    key = f"problems.{problem}.remat"
    if setting == AUTO:
        found = dict(_repeated(module, ""))
        if not found:
            raise ConfigError(
                f"{key}: found auto, but {type(module).__name__} has no repeated blocks; expected them in an "
                f"nn.ModuleList or nn.Sequential. Write paths of submodules, such as {key}=['{_example(module)}']."
            )
    else:
        patterns = [setting] if isinstance(setting, str) else setting
        found = dict(item for pattern in patterns for item in _matched(key, module, pattern))
    once: dict[int, tuple[str, nn.Module]] = {}
    for path, block in found.items():
        once.setdefault(id(block), (path, block))
    return dict(once.values())


def _matched(key: str, module: nn.Module, pattern: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the blocks that one pattern matches."""
    submodules = {path: block for path, block in module.named_modules(remove_duplicate=False) if path}
    found = {path: block for path, block in submodules.items() if _matches(path, pattern)}
    listed = next((path for path, block in found.items() if not _has_forward(block)), None)
    if listed is not None:
        raise ConfigError(
            f"{key}: found {pattern!r}, which matches '{listed}', a {type(found[listed]).__name__} that is never "
            f"called itself; expected modules that are. Write '{listed}.*' for those inside it."
        )
    if not found:
        numbered = [".".join("*" if part.isdigit() else part for part in path.split(".")) for path in submodules]
        children = ", ".join([name for name, _ in module.named_children()][:12])
        raise ConfigError(
            f"{key}: found {pattern!r}, which matches no submodule of {type(module).__name__}; expected paths in which "
            f"* is any text within one name (its children: {children})."
            f"{did_you_mean(pattern, dict.fromkeys([AUTO, *numbered, *submodules]))} Correct the path, or write auto."
        )
    yield from found.items()


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
    for name, value in children.items():
        is_repeated = isinstance(module, nn.ModuleList) or (
            isinstance(module, nn.Sequential) and counts[type(value)] > 1
        )
        is_block = is_repeated and _is_block(value)
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


def _described(blocks: Mapping[str, nn.Module]) -> str:
    """Return `blocks.0 to blocks.7 (8 of Block)`, for each class in each list of blocks."""
    runs: dict[tuple[str, str], list[str]] = {}
    for path, block in blocks.items():
        runs.setdefault((path.rpartition(".")[0], type(block).__name__), []).append(path)
    ends = {key: " to ".join(dict.fromkeys((paths[0], paths[-1]))) for key, paths in runs.items()}
    return ", ".join(f"{ends[key]} ({len(paths)} of {key[1]})" for key, paths in runs.items())


def _example(module: nn.Module) -> str:
    return next((f"{name}.*" for name, child in module.named_children() if any(True for _ in child.children())), "0")
