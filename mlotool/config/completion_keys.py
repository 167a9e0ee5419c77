"""The keys of a config, put together from the YAML files: Hydra, which would compose it, takes 0.2 s to import.

A line that Hydra would refuse may have keys here. A test holds the keys of every recipe equal to Hydra's.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlotool.config.defaults import choices_in, defaults_faults, full_address
from mlotool.config.options import check_total, option_file, read_option
from mlotool.config.paths import GROUP, SUFFIX, package_dir, recipe_file, recipe_folders
from mlotool.config.reading import MAX_RECIPE_NODES, read_document
from mlotool.config.recipes import unknown_recipe
from mlotool.config.replacement import Layer, choice_of, dropped_places, without
from mlotool.config.schema import GROUPS, MISSING, defaults_at, is_container
from mlotool.core.errors import ConfigError

_CHOICE = re.compile(r"(?P<sign>[+~]?)(?P<address>(?P<group>\w+)(@[\w.]+)?)(=(?P<options>[^{]*))?", re.ASCII)
MAX_FILES = 200


def compose_keys(words: Sequence[str], folders: Sequence[Path] = ()) -> dict[str, Any]:
    """Return a config with the keys that `compose` gives, and those that conf/config.yaml has under `hydra`.

    Args:
        words: a command line, of which only choices of options count: `+recipe=mwn`, `hypergradient=cg`.
        folders: where recipes are looked for first.

    Raises:
        ConfigError: a file that is not there, or is no config.

    Example:
        >>> list(compose_keys(["+recipe=mwn", "hypergradient=first_order"])["hypergradient"])
        ['_target_']
    """
    files = read_files(words, folders)
    config: dict[str, Any] = {}
    layers = files.found[::-1]
    for layer, places in zip(layers, dropped_places(layers, files.typed), strict=True):
        config = merged(config, without(layer.content, places))
    return _with_defaults(config)


def read_files(words: Sequence[str], folders: Sequence[Path]) -> "Files":
    """Return the files that a command line's choices lead to."""
    files = Files([*folders, *(folder for _, folder in recipe_folders())])
    appended: list[dict[str, list[str]]] = []
    for choice in (match for match in map(_CHOICE.fullmatch, words) if match and match["group"] in GROUPS):
        text = choice["options"] or ""
        names = [name for name in re.findall(r"[^,\[\]'\"]+", text) if name != "null" and choice["sign"] != "~"]
        # Of a sweep's options the first one stands for all.
        options = names if "[" in text else names[:1]
        if choice["sign"] == "+":
            appended.append({choice["address"]: options})
        else:
            files.choices[full_address(choice["address"])] = options
    files.typed = list(files.choices)
    files.add("config", "", appended)
    return files


class Files:
    """The files that make up a config.

    A defaults list is read from its end, as Hydra does: so what a recipe overrides is known to conf/config.yaml's
    entries before it. Of several overrides the first one read counts: the command line's, then the outer recipe's.

    Args:
        folders: of recipes, in the order in which they are looked through.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = folders
        self.choices: dict[str, list[str]] = {}
        self.typed: list[str] = []
        self.paths: list[tuple[str, str]] = []
        self.found: list[Layer] = []
        self.num_files = 0
        self.num_values = 0

    def add(self, path: str, package: str, appended: Sequence[dict[str, list[str]]] = ()) -> None:
        """Add a file, as `group/option`, and those that its defaults list names."""
        self.num_files += 1
        if self.num_files > MAX_FILES:
            raise ConfigError(
                f"{path}: found more than {MAX_FILES} files behind it; expected fewer. Inherit from fewer."
            )
        content = dict(self._load(path))
        defaults = content.pop("defaults", None) or []
        entries = [*defaults, *([] if "_self_" in defaults else ["_self_"]), *appended]
        for address, options in choices_in(entries, "override"):
            self.choices.setdefault(address, options)
        for entry in reversed(entries):
            if entry == "_self_":
                self.paths.append((path, package))
                self.found.append(Layer(_placed(package, content), choice_of(path, package), defaults))
            elif isinstance(entry, str):
                name, _, place = entry.partition("@")
                beside = f"{path.rpartition('/')[0]}/{name}".strip("/")
                self.add(name[1:] if name.startswith("/") else beside, place.replace("_global_", "") or package)
            for address, options in choices_in([entry], ""):
                group, _, place = address.partition("@")
                for option in reversed(self.choices.get(address, options)):
                    self.add(f"{group}/{option}", "" if group == GROUP else place)

    def _load(self, path: str) -> dict[str, Any]:
        if path == "mlotool_schema":
            return {}
        group, _, name = path.partition("/")
        recipes = (recipe_file(folder, name) for folder in self.folders)
        file = next(filter(None, recipes), None) if group == GROUP else package_dir("conf") / f"{path}{SUFFIX}"
        if file is None:
            raise unknown_recipe(name)
        if group != GROUP and not file.is_file() and (own := option_file(group, name)) is not None:
            return self._load_own(group, own)
        content = read_document(file, is_fast=True, max_nodes=MAX_RECIPE_NODES).data
        if group == GROUP and any(defaults_faults(content.get("defaults"))):
            raise ConfigError(f"{file}: found no config; expected keys. See `mlotool validate {name}`.")
        return content

    def _load_own(self, group: str, file: Path) -> dict[str, Any]:
        document = read_option(group, file, is_fast=True)
        self.num_values += document.num_nodes
        check_total(self.num_values)
        return document.data


def _placed(package: str, content: Any) -> Any:
    for key in reversed(package.split(".") if package else []):
        content = {key: content}
    return content


def merged(below: Any, above: Any) -> Any:
    """Return one tree laid over another."""
    if isinstance(below, dict) and isinstance(above, dict):
        return below | {key: merged(below.get(key, MISSING), value) for key, value in above.items()}
    return below if above == MISSING else above


def _with_defaults(node: Any, path: str = "") -> Any:
    """Add the keys of the schema to what a config says; where it says null there are none."""
    if not isinstance(node, dict) or not is_container(path):
        return node
    node = merged(defaults_at(path), node)
    return {key: _with_defaults(value, f"{path}.{key}".strip(".")) for key, value in node.items()}
