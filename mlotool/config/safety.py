"""What a recipe may not contain, refused on its raw text: Hydra acts on some of it before any other check could run."""

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

from mlotool.config.reading import MAX_RECIPE_NODES, Document, leaves, read_document
from mlotool.config.recipes import recipe_file, recipe_folders, what_to_do_with_a_run
from mlotool.config.schema import GROUPS, MISSING, ROOT_KEYS, boolean_faults, is_container, name_fault
from mlotool.core.errors import ConfigError
from mlotool.core.messages import did_you_mean, fault_list

_OPTION = re.compile(r"[A-Za-z0-9_][\w\-]*(/[A-Za-z0-9_][\w\-]*)*", re.ASCII)
_GROUP_KEY = re.compile(r"(?:optional\s+|override\s+)*(?P<group>[^@\s]+)(?:@(?P<package>\S+))?")
_PACKAGE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)


def defaults_faults(defaults: Any) -> Iterator[str]:
    """Yield what is wrong with a recipe's defaults list."""
    if defaults is None:
        return
    if not isinstance(defaults, list):
        yield f"defaults: found a {type(defaults).__name__}; expected a list. Write `- /model@...: mlp` lines."
        return
    for entry in defaults:
        yield from _entry_faults(entry)


def recipe_entries(defaults: Any) -> Iterator[str]:
    """Yield the recipes that a defaults list inherits from, as they are written: `mwn`, `/recipe/mwn`."""
    for entry in defaults if isinstance(defaults, list) else []:
        if isinstance(entry, str) and entry != "_self_":
            yield entry.partition("@")[0]


def choices_in(defaults: Any, word: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the lines `[override] group@package: options` of a defaults list that have the word, or have none."""
    entries = [entry for entry in defaults if isinstance(entry, dict)] if isinstance(defaults, list) else []
    for key, value in (pair for entry in entries for pair in entry.items()):
        words = str(key).replace("optional ", "").split()
        if words[:-1] == word.split():
            options = [str(each) for each in (value if isinstance(value, list) else [value])]
            yield full_address(words[-1]), [each for each in options if each not in ("None", "null", MISSING)]


def full_address(address: str) -> str:
    """Return an address with its package, which is the group's name where none is written.

    Example:
        >>> full_address("/data"), full_address("model@problems.classifier.module")
        ('data@data', 'model@problems.classifier.module')
    """
    group, _, package = address.removeprefix("/").partition("@")
    return f"{group}@{package or group.replace('/', '.')}"


def key_faults(where: str, group: str, package: str | None) -> Iterator[str]:
    """Yield what is wrong with `group@package`, the address of a choice."""
    if group not in GROUPS:
        yield (
            f"{where}: found the group '{group}'; expected one of {', '.join(GROUPS)}.{did_you_mean(group, GROUPS)}"
            + (" Hydra's own groups belong on the command line." if group.split("/")[0] == "hydra" else " Correct it.")
        )
    if group == "recipe" and package is not None:
        # Below another key its values would stand where no check of its file looked for them.
        yield f"{where}: found the package '{package}'; expected none, as a recipe is a whole. Remove the @ and it."
    elif package is not None and not (_PACKAGE.fullmatch(package) and package.split(".")[0] in ROOT_KEYS):
        yield (
            f"{where}: found the package '{package}'; expected a place in the recipe such as "
            "problems.classifier.module. Correct what stands behind the @."
        )


def option_faults(where: str, value: Any) -> Iterator[str]:
    """Yield what is wrong with the name of an option."""
    for option in value if isinstance(value, list) else [value]:
        # YAML reads a bare `off` as false.
        text = {False: "off", True: "on"}.get(option, option) if isinstance(option, bool) else option
        if text is not None and not (isinstance(text, str) and _OPTION.fullmatch(text)):
            yield f"{where}: found {option!r}; expected the name of an option, no path and no ${{...}}. Correct it."


def _entry_faults(entry: Any) -> Iterator[str]:
    if entry == "_self_":
        return
    if isinstance(entry, str):
        path, _, package = entry.partition("@")
        where = f"defaults, '{entry}'"
        yield from option_faults(where, path.removeprefix("/recipe/"))
        if package and package != "_global_":
            yield from key_faults(where, "recipe", package)
        return
    if not isinstance(entry, dict) or len(entry) != 1:
        yield f"defaults: found {entry!r}; expected lines such as `- override /data: digits`. Correct it."
        return
    [(key, value)] = entry.items()
    match = _GROUP_KEY.fullmatch(str(key).strip())
    where = f"defaults, '{key}: {value}'"
    if match is None:
        yield f"{where}: expected `- override /data: digits` or `- /model@problems.<name>.module: mlp`. Correct it."
        return
    group = match["group"]
    if not group.startswith("/"):
        yield f"{where}: found the group '{group}' without a slash; expected '/{group}'. Write `- /{key}: {value}`."
        group = f"/{group}"
    if group == "/recipe":
        # Hydra would take it for a second choice beside +recipe=..
        yield f"{where}: found the group 'recipe'; expected the inherited recipe's name alone. Write `- {value}`."
    yield from key_faults(where, group.removeprefix("/"), match["package"])
    yield from option_faults(where, value)


# Arguments that write, download or unpickle, and the values that do nothing.
DANGEROUS: dict[str, tuple[Any, ...]] = {
    "dirpath": (None,),
    "loader": (None,),
    "weights": (None,),
    "weights_only": (True,),
    "download": (False, None),
    "pickle_module": (None,),
}
# A recipe may not send a run anywhere.
OFFLINE_MODES = ("offline", "disabled")
_WORDS = re.compile(r"[\s,\[\]()'\"=]+")
# Where files and jobs go is the command line's: a launcher's options are commands to a cluster.
NOT_IN_RECIPES = ("devices", "launcher", "launcher_options", "storage")
_SWEPT_KEY = re.compile(r"(?P<prefix>\+{0,2}|~)(?P<path>[A-Za-z_][\w.]*)(?:@(?P<package>[\w.]+))?", re.ASCII)


def node_faults(node: Any) -> Iterator[str]:
    """Yield what is wrong with a recipe's `sweep`."""
    if node is None:
        return
    if not isinstance(node, dict):
        yield f"sweep: found {node!r}; expected keys such as params and num_trials. Write them out."
        return
    for key, value in node.items():
        if key in NOT_IN_RECIPES:
            yield f"sweep.{key}: found {value!r}; expected it on the command line alone: sweep.{key}=... Remove it."
    yield from sweep_faults(node.get("params"), "sweep.params")


def sweep_faults(params: Any, place: str = "hydra.sweeper.params") -> Iterator[str]:
    """Yield what is wrong with the choices that a recipe's sweep lists."""
    if params is None:
        return
    if not isinstance(params, dict):
        yield f"{place}: found {params!r}; expected keys with choices. Write `seed: 0,1,2`."
        return
    for key, value in params.items():
        where = f"{place}, '{key}'"
        match = _SWEPT_KEY.fullmatch(str(key))
        root = match["path"].split(".")[0] if match else ""
        if match is None or root not in (*ROOT_KEYS, *GROUPS) or root in ("name", "sweep", "resume"):
            yield (
                f"{where}: expected a key of the recipe, such as problems.<name>.unroll_steps, not name, sweep or "
                "resume. Correct it."
            )
        elif match["path"].rpartition(".")[2] in DANGEROUS:
            yield f"{where}: expected no key that downloads, unpickles or chooses where files go. Remove it."
        elif root == "logger" and "." in match["path"]:
            yield f"{where}: expected no setting of the logger, which may send a run away. Remove it."
        elif match["package"]:
            yield from key_faults(where, match["path"], match["package"])
        if not isinstance(value, str | int | float):
            yield f"{where}: found {value!r}; expected choices in one text. Write `seed: 0,1,2`."
        elif isinstance(value, str) and "{" in value.replace("${", ""):
            # A mapping could hold what no key here may name.
            yield f"{where}: found {value!r}; expected values or options of a group, no mappings. Sweep each key."
        elif isinstance(value, str) and "${" in value:
            yield f"{where}: found {value!r}; expected no reference. Write the choices out."
        elif isinstance(value, str):
            faults = (fault for word in _WORDS.split(value) for fault in place_faults(where, word))
            yield from list(faults)[:1]


_REFERENCE = re.compile(
    r"\$\{(?:oc\.(?P<resolver>select|dict\.keys|dict\.values):)?(?P<dots>\.*)(?P<root>[A-Za-z_]\w*)(?:\.\w+|\[\d+\])*"
    r"(?P<default>, ?[\w.+\-]+)?\}",
    re.ASCII,
)
_OUTSIDE = re.compile(r"[/\\~]|[A-Za-z][A-Za-z0-9+.\-]*:[/\\]")


def reference_faults(key: str, value: str) -> Iterator[str]:
    """Yield what is wrong with a text that refers to other values.

    Args:
        key: where it stands.
        value: the text.
    """
    if "${" not in value:
        return
    match = _REFERENCE.fullmatch(value)
    if match is None or (match["default"] and match["resolver"] != "select"):
        yield (
            f"{key}: found {value!r}; expected a reference alone, such as ${{data.num_classes}}, without a resolver or "
            "other text. Write the value, or give it on the command line."
        )
    elif not match["dots"] and match["root"] not in ROOT_KEYS:
        yield f"{key}: found {value!r}; expected a reference to one of {', '.join(ROOT_KEYS)}. Correct it."
    elif "." not in key and is_container(key):
        yield f"{key}: found {value!r}; expected its keys written out, which are checked here. Write them out."


def place_faults(key: str, value: str) -> Iterator[str]:
    """Yield what is wrong with a text that may be the path of a file: it has to lie below the working folder.

    Args:
        key: where it stands.
        value: the text.
    """
    # `${..seed}` climbs in the config, not on the disk.
    parts = re.split(r"[/\\]", value)
    if _OUTSIDE.match(value) or "://" in value or ".." in parts:
        yield (
            f"{key}: found {value!r}; expected a path below the working folder, such as datasets/mine, as a recipe may "
            f"not choose other places. Write one, or give it on the command line: {key}=.."
        )


PACKAGE_HEADER = "# @package _global_"
# Each costs Hydra and OmegaConf milliseconds, several times over.
MAX_FILES = 150
_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_\-]*", re.ASCII)
_ARGUMENT = re.compile(r"(data|hypergradient|problems\.[^.]+\.[^.]+|analyses\.[^.]+)\.(?P<path>.+)")
_ROLES = re.compile(r"(problems\.[^.]+\.loss|analyses\.[^.]+)\.roles\.[^.]+")


def check_recipe_file(path: Path | str) -> None:
    """Refuse a recipe that could act before or outside a run; follows its defaults through the user's recipes.

    Raises:
        ConfigError: with every fault of the first file that has any.
    """
    seen: set[Path] = set()
    num_nodes = num_files = 0
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
        num_nodes += document.num_nodes
        num_files += 1 + len(leaves(document.data.get("defaults") or []))
        if num_nodes > MAX_RECIPE_NODES or num_files > MAX_FILES:
            raise ConfigError(
                f"{path}: found {num_nodes} values and {num_files} recipes and options, with the recipes that it "
                f"inherits from; expected at most {MAX_RECIPE_NODES} and {MAX_FILES}. Write a smaller recipe."
            )
        for name in recipe_entries(document.data.get("defaults") or []):
            found = inherited_file(name, file)
            if found is not None:
                waiting.append(found)


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
        if key.startswith("logger.loggers"):
            yield f"{key}: found {value!r}; expected no logger in a recipe, which may not send a run away. Remove it."
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
