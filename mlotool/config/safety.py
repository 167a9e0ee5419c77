"""What a recipe may not contain, refused on its raw text: Hydra acts on some of it before any other check could run."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from mlotool.config.defaults import defaults_faults, recipe_entries
from mlotool.config.names import name_fault
from mlotool.config.paths import recipe_file, recipe_folders
from mlotool.config.reading import MAX_RECIPE_NODES, Document, leaves, read_document
from mlotool.config.recipes import what_to_do_with_a_run
from mlotool.config.references import place_faults, reference_faults
from mlotool.config.schema import ROOT_KEYS
from mlotool.config.schema_faults import boolean_faults
from mlotool.config.sweep import DANGEROUS, OFFLINE_MODES, node_faults, sweep_faults
from mlotool.core.errors import ConfigError
from mlotool.core.faults import fault_list
from mlotool.core.suggest import did_you_mean

PACKAGE_HEADER = "# @package _global_"
# Each costs Hydra and OmegaConf milliseconds, several times over.
MAX_FILES, MAX_PROBLEMS, MAX_EDGES, MAX_CHOICES = 50, 100, 1_000, 100
_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_\-]*", re.ASCII)
_ARGUMENT = re.compile(r"(data|hypergradient|problems\.[^.]+\.[^.]+|analyses\.[^.]+)\.(?P<path>.+)")
_ROLES = re.compile(r"(problems\.[^.]+\.loss|analyses\.[^.]+)\.roles\.[^.]+")


def check_recipe_file(path: Path | str) -> None:
    """Refuse a recipe that could act before or outside a run; follows its defaults through the user's recipes.

    Raises:
        ConfigError: with every fault of the first file that has any.
    """
    seen: set[Path] = set()
    size = _Size(str(path))
    waiting = [Path(path).absolute()]
    while waiting:
        file = waiting.pop()
        if file in seen:
            # Hydra would follow a circle for ever, and a tree of such that doubles at each step for very long.
            raise ConfigError(
                f"{path}: found '{file.stem}' twice among what it inherits; expected each recipe once. Remove it from "
                "one of the defaults lists."
            )
        seen.add(file)
        document = check_recipe(file)
        size.add(document)
        for name in recipe_entries(document.data.get("defaults") or []):
            found = inherited_file(name, file)
            if found is not None:
                waiting.append(found)


@dataclass
class _Size:
    """What a recipe and those that it inherits from add up to."""

    path: str
    num_files: int = 0
    num_nodes: int = 0
    num_edges: int = 0
    num_choices: int = 0
    problems: set[str] = field(default_factory=set)

    def add(self, document: Document) -> None:
        """Count one more file.

        Raises:
            ConfigError: together they are too large.
        """
        data = document.data
        self.num_files += 1
        self.num_nodes += document.num_nodes
        defaults = data.get("defaults")
        for entry in defaults if isinstance(defaults, list) else []:
            self.num_choices += sum(map(len, _listed(entry)))
        self.problems.update(map(str, _mapping(data.get("problems"))))
        for edges in _mapping(data.get("graph")).values():
            self.num_edges += sum(len(ends) for ends in _mapping(edges).values() if isinstance(ends, list))
        for found, what, limit in (
            (self.num_files, "files", MAX_FILES),
            (self.num_nodes, "values", MAX_RECIPE_NODES),
            (self.num_choices, "entries in defaults lists", MAX_CHOICES),
            (len(self.problems), "problems", MAX_PROBLEMS),
            (self.num_edges, "edges in graph", MAX_EDGES),
        ):
            if found > limit:
                raise ConfigError(
                    f"{self.path}: found {found} {what}, with the recipes that it inherits from; expected at most "
                    f"{limit}. Write a smaller recipe."
                )


def _listed(entry: Any) -> list[list[Any]]:
    """Return the options of each choice of an entry in a defaults list."""
    return [value if isinstance(value, list) else [value] for value in _mapping(entry).values()] or [[entry]]


def _mapping(node: Any) -> dict[Any, Any]:
    return node if isinstance(node, dict) else {}


def check_recipe(path: Path) -> Document:
    """Return one recipe file, or raise ConfigError with every fault in it."""
    document = read_document(path, max_nodes=MAX_RECIPE_NODES)
    if PACKAGE_HEADER not in document.text and document.data.keys() >= set(ROOT_KEYS):
        folder = path.parent if (path.parent / "provenance.json").is_file() else "FOLDER"
        raise ConfigError(
            f"{path}: found the config of a run, which has every value; expected a recipe. "
            f"{what_to_do_with_a_run(folder)}"
        )
    faults = [*_header_faults(document), *content_faults(document), *defaults_faults(document.data.get("defaults"))]
    if faults:
        raise ConfigError(fault_list([f"{path}: {fault}" for fault in faults]))
    return document


def content_faults(document: Document) -> list[str]:
    """Return what is wrong with the keys and values of a recipe, or of an option in its place; defaults lists aside."""
    checks: Iterable[Callable[[Document], Iterator[str]]] = (
        _hydra_faults,
        _resume_faults,
        _name_faults,
        _key_faults,
        _value_faults,
        lambda document: node_faults(document.data.get("sweep")),
    )
    return [fault for check in checks for fault in check(document)]


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
    fault = None if name is None else name_fault(name)
    if fault is not None:
        yield f"name: {fault}. Write name: {document.path.stem}."
    for key in document.data:
        if key not in (*ROOT_KEYS, "hydra", "defaults"):
            hint = did_you_mean(str(key), ROOT_KEYS)
            if str(key).startswith("_") or not isinstance(key, str):
                yield f"found the key {key!r}; expected one of {', '.join(ROOT_KEYS)}.{hint} Remove it."


def _key_faults(document: Document) -> Iterator[str]:
    waiting: list[tuple[str, Any]] = [("", _own(document))]
    while waiting:
        place, node = waiting.pop()
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            inner = f"{place}[{key}]" if isinstance(node, list) else f"{place}.{key}".lstrip(".")
            # Those of a sweep are keys with dots; `sweep_faults` looks at them.
            if isinstance(node, dict) and place != "sweep.params" and not _KEY.fullmatch(str(key)):
                yield (
                    f"{place or 'top'}: found the key '{key}'; expected letters, digits, '_' and '-', in ASCII. "
                    "Correct the key."
                )
            if isinstance(value, dict | list):
                waiting.append((inner, value))


def _value_faults(document: Document) -> Iterator[str]:
    for key, value in leaves(_own(document)):
        if is_dangerous(key, value):
            yield (
                f"{key}: found {value!r}; a recipe may not download, unpickle or choose where files go. "
                f"Remove it; for data.download write data.download=true on the command line."
            )
        yield from boolean_faults(key, value)
        if key == "logger.mode" and value not in OFFLINE_MODES:
            yield (
                f"logger.mode: found {value!r}; expected {' or '.join(OFFLINE_MODES)}, as a recipe may not send a run "
                "to an account. Remove it; to upload yours write logger.mode=online on the command line."
            )
        if isinstance(value, str):
            yield from reference_faults(key, value)
            yield from place_faults(key, value)


def is_dangerous(key: str, value: Any) -> bool:
    """Say whether a value downloads, unpickles or chooses where files go; its key is dotted."""
    name = key.rpartition(".")[2]
    # A role may be called `weights`; it only names a problem.
    is_argument = name in DANGEROUS and not _ROLES.fullmatch(key)
    return _is_inside_dangerous(key) or (is_argument and not any(value is allowed for allowed in DANGEROUS[name]))


def _own(document: Document) -> dict[Any, Any]:
    """Return what a recipe sets itself; its defaults and its sweep have checks of their own."""
    return {key: value for key, value in document.data.items() if key not in ("defaults", "hydra")}


def _is_inside_dangerous(key: str) -> bool:
    """Say whether a value stands in a list or mapping that is a dangerous argument: `weights[0]`, `loader.x`."""
    found = _ARGUMENT.fullmatch(key)
    if found is None or _ROLES.match(key):
        return False
    *above, last = found["path"].split(".")
    return not DANGEROUS.keys().isdisjoint(each.partition("[")[0] for each in (*above, last if "[" in last else ""))


def inherited_file(name: str, beside: Path) -> Path | None:
    """Return the file of a recipe that another one inherits from, which may lie beside it."""
    is_absolute, name = name.startswith("/recipe/"), name.removeprefix("/recipe/")
    folders = [*([] if is_absolute else [beside.parent]), *(folder for _, folder in recipe_folders())]
    return next((file for folder in folders if (file := recipe_file(folder, name)) is not None), None)
