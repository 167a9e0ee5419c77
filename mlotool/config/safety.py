"""What a recipe may not contain, refused on its raw text: Hydra acts on some of it before any other check could run."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from mlotool.config.defaults import defaults_faults, recipe_entries
from mlotool.config.names import is_plain_name
from mlotool.config.paths import recipe_file, recipe_folders
from mlotool.config.schema import ROOT_KEYS
from mlotool.config.sweep import DANGEROUS, sweep_faults
from mlotool.core.errors import ConfigError
from mlotool.core.suggest import did_you_mean

MAX_BYTES = 200_000
MAX_NODES = 20_000
PACKAGE_HEADER = "# @package _global_"
RESOLVERS = ("oc.select", "oc.dict.keys", "oc.dict.values")
_ARGUMENT = re.compile(r"(data|hypergradient|problems\.[^.]+\.[^.]+|analyses\.[^.]+)\.(?P<path>.+)")
_ROLES = re.compile(r"(problems\.[^.]+\.loss|analyses\.[^.]+)\.roles\.[^.]+")


@dataclass(frozen=True)
class Document:
    """A recipe file, parsed but not interpreted."""

    path: Path
    text: str
    data: dict[Any, Any]


def check_recipe_file(path: Path | str) -> None:
    """Refuse a recipe that could act before or outside a run; follows its defaults through the user's recipes.

    Raises:
        ConfigError: with every fault of the first file that has any.
    """
    seen: set[Path] = set()
    waiting = [Path(path).absolute()]
    while waiting:
        file = waiting.pop()
        if file in seen:
            continue
        seen.add(file)
        document = _checked(file)
        for name in recipe_entries(document.data.get("defaults") or []):
            found = _find(name, file)
            if found is not None:
                waiting.append(found)


def check_text(path: Path) -> str:
    """Return the text of one recipe file, or raise ConfigError with every fault in it."""
    return _checked(path).text


def _checked(path: Path) -> Document:
    document = _read(path)
    checks: Iterable[Callable[[Document], Iterator[str]]] = (
        _header_faults,
        _hydra_faults,
        _resume_faults,
        _name_faults,
        _value_faults,
    )
    faults = [fault for check in checks for fault in check(document)]
    faults += defaults_faults(document.data.get("defaults"))
    if faults:
        raise ConfigError("\n".join(f"{path}: {fault}" for fault in faults))
    return document


def _read(path: Path) -> Document:
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise ConfigError(
                f"{path}: found {size} bytes; expected a recipe of at most {MAX_BYTES}. Keep data in files of its own."
            )
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        _check_nodes(path, root)
        data = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); expected a YAML text file. Correct the file.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: this is not YAML: {_place(error)}. Correct the file there.") from error
    if data is not None and not isinstance(data, dict):
        raise ConfigError(
            f"{path}: found a {type(data).__name__} at the top; expected keys such as problems and graph. "
            "Write `key: value` lines; see `mlotool show mwn`."
        )
    return Document(path, text, data or {})


def _place(error: yaml.YAMLError) -> str:
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
    return problem if mark is None else f"{problem} in line {mark.line + 1}, column {mark.column + 1}"


def _check_nodes(path: Path, root: yaml.Node | None) -> None:
    """Refuse tags, and aliases that blow a small file up."""
    sizes: dict[int, int] = {}

    def size(node: yaml.Node, above: frozenset[int]) -> int:
        if id(node) in above:
            raise ConfigError(f"{path}: an alias contains itself{_line(node)}; expected a tree. Write the value out.")
        if id(node) not in sizes:
            if not node.tag.startswith("tag:yaml.org,2002:") or node.tag.startswith("tag:yaml.org,2002:python"):
                raise ConfigError(
                    f"{path}: found the YAML tag '{node.tag}'{_line(node)}; expected plain values. Remove the tag."
                )
            _check_keys(path, node)
            below = above | {id(node)}
            sizes[id(node)] = 1 + sum(size(child, below) for child in _children(node))
        return sizes[id(node)]

    if root is not None and size(root, frozenset()) > MAX_NODES:
        raise ConfigError(
            f"{path}: its aliases expand to {sizes[id(root)]} values; expected at most {MAX_NODES}. Write less, or "
            "keep data in files of its own."
        )


def _check_keys(path: Path, node: yaml.Node) -> None:
    names = [key.value for key, _ in node.value] if isinstance(node, yaml.MappingNode) else []
    for index, name in enumerate(names):
        if isinstance(name, str) and name != "<<" and name in names[:index]:
            line = _line(node.value[index][0])
            raise ConfigError(f"{path}: found the key '{name}' twice, again{line}; expected it once. Remove one.")


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [child for pair in node.value for child in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def _line(node: yaml.Node) -> str:
    return f" in line {node.start_mark.line + 1}"


def _header_faults(document: Document) -> Iterator[str]:
    lines = [line.strip() for line in document.text.splitlines() if line.strip()]
    first = next(iter(lines), "")
    # Hydra reads headers up to the first line that is none.
    headers = list(takewhile(lambda line: line.lstrip("# ").startswith("@") and line.startswith("#"), lines))
    if first != PACKAGE_HEADER:
        yield (
            f"found '{first[:60]}' as the first line; expected '{PACKAGE_HEADER}', without which the keys would land "
            "under 'recipe'. Put that line first."
        )
    for header in headers:
        if header != PACKAGE_HEADER:
            yield f"found the header '{header}'; expected '{PACKAGE_HEADER}' and no other. Remove it."


def _resume_faults(document: Document) -> Iterator[str]:
    if "resume" in document.data:
        yield (
            "found the key 'resume'; expected it on the command line alone, since it says where files are written. "
            "Remove it, and run with resume=auto."
        )


def _hydra_faults(document: Document) -> Iterator[str]:
    for key in document.data:
        if key != "hydra" and isinstance(key, str) and key.split(".")[0].split("/")[0] == "hydra":
            yield f"found the key '{key}'; expected keys of a recipe. Remove it."
    if "hydra" not in document.data:
        return
    node = document.data["hydra"]
    sweeper = node.get("sweeper") if isinstance(node, dict) else None
    surplus = [f"hydra.{key}" for key in node if key != "sweeper"] if isinstance(node, dict) else ["hydra"]
    if isinstance(sweeper, dict):
        surplus += [f"hydra.sweeper.{key}" for key in sweeper if key != "params"]
    elif not surplus:
        surplus = ["hydra.sweeper"]
    for key in surplus:
        yield (
            f"found the key '{key}'; expected nothing under hydra but hydra.sweeper.params, since Hydra calls targets "
            "and moves output folders on its own. Remove it, or give it on the command line."
        )
    if isinstance(sweeper, dict):
        yield from sweep_faults(sweeper.get("params"))


def _name_faults(document: Document) -> Iterator[str]:
    name = document.data.get("name")
    if name is not None and not is_plain_name(name):
        yield (
            f"name: found {name!r}; expected letters, digits, '-', '_' and '.', as it names the output folder. "
            f"Write name: {document.path.stem}."
        )
    for key in document.data:
        if key not in (*ROOT_KEYS, "hydra", "defaults"):
            hint = did_you_mean(str(key), ROOT_KEYS)
            if str(key).startswith("_") or not isinstance(key, str):
                yield f"found the key {key!r}; expected one of {', '.join(ROOT_KEYS)}.{hint} Remove it."


def _value_faults(document: Document) -> Iterator[str]:
    for key, value in _leaves({k: v for k, v in document.data.items() if k not in ("defaults", "hydra")}):
        name = key.rpartition(".")[2]
        # A role may be called `weights`; it only names a problem.
        is_argument = name in DANGEROUS and not _ROLES.fullmatch(key)
        is_refused = is_argument and not any(value is allowed for allowed in DANGEROUS[name])
        if is_refused or _is_inside_dangerous(key):
            yield (
                f"{key}: found {value!r}; a recipe may not download, unpickle or choose where files go. "
                f"Remove it; for data.download write data.download=true on the command line."
            )
        if isinstance(value, str) and "${" in value:
            yield from (
                f"{key}: found the resolver '{resolver}' in {value!r}; expected references such as "
                "${data.num_classes}. Write the value, or give it on the command line."
                for resolver in _resolvers(value)
                if resolver not in RESOLVERS
            )


def _is_inside_dangerous(key: str) -> bool:
    """Say whether a value stands in a list or mapping that is a dangerous argument: `weights[0]`, `loader.x`."""
    found = _ARGUMENT.fullmatch(key)
    if found is None or _ROLES.match(key):
        return False
    *above, last = found["path"].split(".")
    return not DANGEROUS.keys().isdisjoint(each.partition("[")[0] for each in (*above, last if "[" in last else ""))


def _leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key))
            if isinstance(key, str) and "${" in key:
                yield f"{prefix}.<key>", key
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _leaves(value, f"{prefix}[{index}]")
    else:
        yield prefix, node


def _resolvers(text: str) -> Iterator[str]:
    """Yield the names of the resolvers that OmegaConf would call."""
    from omegaconf.errors import GrammarParseError
    from omegaconf.grammar.gen.OmegaConfGrammarParser import OmegaConfGrammarParser
    from omegaconf.grammar_parser import parse

    try:
        waiting = [parse(text)]
    except GrammarParseError:
        return  # OmegaConf refuses it as well, with the key
    while waiting:
        node = waiting.pop()
        if isinstance(node, OmegaConfGrammarParser.InterpolationResolverContext):
            yield node.resolverName().getText()
        waiting.extend(getattr(node, "children", None) or [])


def _find(name: str, beside: Path) -> Path | None:
    folders = [beside.parent, *(folder for _, folder in recipe_folders())]
    return next((file for folder in folders if (file := recipe_file(folder, name)) is not None), None)
