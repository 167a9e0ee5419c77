"""What a recipe, and an option of ./conf, may not contain: refused on what was read, before Hydra acts on it."""

import re
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

from mlotool.config.recipes import package_dir, recipe_file, recipe_folders, what_to_do_with_a_run
from mlotool.config.schema import GROUPS, MISSING, ROOT_KEYS, boolean_faults, is_container, name_fault
from mlotool.config.security.trusted import FILE_LOGGERS, is_of_user, trust_fault
from mlotool.core.errors import ConfigError
from mlotool.core.messages import did_you_mean, fault_list
from mlotool.folders.documents import MAX_RECIPE_NODES, Document, leaves, read_document, value_at
from mlotool.folders.run_folder import RunFolder

# Groups whose options are built by their `_target_`; those of the others have the schema's keys.
TARGET_GROUPS = ("data", "model", "optimizer", "hypergradient", "parallel")

# Arguments that write, download or unpickle, and the values that do nothing.
DANGEROUS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("dirpath", "loader", "weights", "pickle_module"), (None,)),
    "weights_only": (True,),
    "download": (False, None),
}
# A recipe may not send a run anywhere.
OFFLINE_MODES = ("offline", "disabled")
# Where files and jobs go is the command line's: a launcher's options are commands to a cluster.
NOT_IN_RECIPES = ("devices", "launcher", "launcher_options", "storage")
PACKAGE_HEADER = "# @package _global_"
# Each costs Hydra and OmegaConf milliseconds, several times over.
MAX_FILES = 150

_OPTION = re.compile(r"[A-Za-z0-9_][\w\-]*(/[A-Za-z0-9_][\w\-]*)*", re.ASCII)
_GROUP_KEY = re.compile(r"(?:optional\s+|override\s+)*(?P<group>[^@\s]+)(?:@(?P<package>\S+))?")
_PACKAGE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
_WORDS = re.compile(r"[\s,\[\]()'\"=]+")
_SWEPT_KEY = re.compile(r"(?P<prefix>\+{0,2}|~)(?P<path>[A-Za-z_][\w.]*)(?:@(?P<package>[\w.]+))?", re.ASCII)
_REFERENCE = re.compile(
    r"\$\{(?:oc\.(?P<resolver>select|dict\.keys|dict\.values):)?(?P<dots>\.*)(?P<root>[A-Za-z_]\w*)(?:\.\w+|\[\d+\])*"
    r"(?P<default>, ?[\w.+\-]+)?\}",
    re.ASCII,
)
_OUTSIDE = re.compile(r"[/\\~]|[A-Za-z][A-Za-z0-9+.\-]*:[/\\~]")
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
                f"{path}: found '{file.stem}' twice among the recipes that it inherits. Remove one of them."
            )
        seen.add(file)
        document = check_recipe(file)
        defaults = document.data.get("defaults") or []
        num_nodes += document.num_nodes
        num_files += 1 + len(leaves(defaults))
        if num_nodes > MAX_RECIPE_NODES or num_files > MAX_FILES:
            raise ConfigError(
                f"{path}: found {num_nodes} values and {num_files} recipes and options, with the recipes that it "
                f"inherits from; expected at most {MAX_RECIPE_NODES} and {MAX_FILES}. Write a smaller recipe."
            )
        waiting += filter(None, (inherited_file(name, file) for name in recipe_entries(defaults)))


def check_recipe(path: Path) -> Document:
    """Return one recipe file, or raise ConfigError with every fault in it."""
    document = read_document(path, max_nodes=MAX_RECIPE_NODES)
    if PACKAGE_HEADER not in document.text and document.data.keys() >= set(ROOT_KEYS):
        folder = path.parent if RunFolder(path.parent).has_inputs else "FOLDER"
        raise ConfigError(
            f"{path}: found the config of a run, which has every value; expected a recipe. "
            f"{what_to_do_with_a_run(folder)}"
        )
    refuse(path, [*_header_faults(document), *content_faults(document.data), *_defaults_faults(document)])
    return document


def refuse(path: Path, faults: list[str]) -> None:
    """Raise a ConfigError with all faults of a file, if there are any."""
    if faults:
        raise ConfigError(fault_list([f"{path}: {fault}" for fault in faults]))


def read_option(group: str, file: Path) -> Document:
    """Read the file of an option.

    Raises:
        ConfigError: it is none, or has what an option cannot have wherever it is placed.
    """
    document = read_document(file, max_nodes=MAX_RECIPE_NODES)
    faults = [f"found the header '{header[:60]}'; expected none. Remove it." for header in _headers(document.text)]
    wanted = "'_target_'" if group in TARGET_GROUPS else "keys"
    if "defaults" in document.data:
        faults.append("found the key 'defaults'; expected the option's own keys, all of them. Write them out.")
    elif not document.data or (group in TARGET_GROUPS and "_target_" not in document.data):
        faults.append(f"found no {wanted}; expected an option like those in {package_dir('conf') / group}. Correct it.")
    refuse(file, faults)
    return document


def recipe_entries(defaults: Any) -> Iterator[str]:
    """Yield the recipes that a defaults list inherits from, as they are written: `mwn`, `/recipe/mwn`."""
    for entry in defaults if isinstance(defaults, list) else []:
        if isinstance(entry, str) and entry != "_self_":
            yield entry.partition("@")[0]


def inherited_file(name: str, beside: Path) -> Path | None:
    """Return the file of a recipe that another one inherits from, which may lie beside it."""
    is_absolute, name = name.startswith("/recipe/"), name.removeprefix("/recipe/")
    folders = [*([] if is_absolute else [beside.parent]), *(folder for _, folder in recipe_folders())]
    return next((file for folder in folders if (file := recipe_file(folder, name)) is not None), None)


def choices_in(defaults: Any) -> Iterator[tuple[str, list[str]]]:
    """Yield the lines `[override] group@package: options` of a defaults list."""
    for entry in defaults if isinstance(defaults, list) else []:
        for key, value in entry.items() if isinstance(entry, dict) else ():
            options = [str(option) for option in (value if isinstance(value, list) else [value])]
            address = str(key).split()[-1] if str(key).split() else ""
            yield full_address(address), [option for option in options if option not in ("None", "null", MISSING)]


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
        known = ", ".join(GROUPS)
        yield f"{where}: found the group '{group}'; expected one of {known}.{did_you_mean(group, GROUPS)} Correct it."
    if group == "recipe" and package is not None:
        # Below another key its values would stand where no check of its file looked for them.
        yield f"{where}: found the package '{package}'; expected none for a recipe. Remove the '@' and the package."
    elif package is not None and not (_PACKAGE.fullmatch(package) and package.split(".")[0] in ROOT_KEYS):
        yield f"{where}: found the package '{package}'; expected a place such as problems.x.module. Correct it."


def _option_faults(where: str, value: Any) -> Iterator[str]:
    """Yield what is wrong with the name of an option."""
    for option in value if isinstance(value, list) else [value]:
        # YAML reads a bare `off` as false.
        text = {False: "off", True: "on"}.get(option, option) if isinstance(option, bool) else option
        if text is not None and not (isinstance(text, str) and _OPTION.fullmatch(text)):
            yield f"{where}: found {option!r}; expected the name of an option, no path and no ${{...}}. Correct it."


def _defaults_faults(document: Document) -> Iterator[str]:
    """Yield what is wrong with a recipe's defaults list."""
    defaults = document.data.get("defaults")
    if defaults is not None and not isinstance(defaults, list):
        yield f"defaults: found a {type(defaults).__name__}; expected a list. Write `- /model@...: mlp` lines."
    for index, entry in enumerate(defaults if isinstance(defaults, list) else ()):
        for fault in _entry_faults(entry):
            yield f"defaults, line {document.line_of((f'defaults[{index}]',))}, {fault}"


def _entry_faults(entry: Any) -> Iterator[str]:
    if isinstance(entry, str) and entry != "_self_":
        path, _, package = entry.partition("@")
        where = f"'{entry}'"
        yield from _option_faults(where, path.removeprefix("/recipe/"))
        if package and package != "_global_":
            yield from key_faults(where, "recipe", package)
    elif isinstance(entry, dict) and len(entry) == 1:
        [(key, value)] = entry.items()
        yield from _choice_faults(str(key).strip(), value)
    elif entry != "_self_":
        yield f"found {entry!r}; expected lines such as `- override /data: digits`. Correct it."


def _choice_faults(key: str, value: Any) -> Iterator[str]:
    match = _GROUP_KEY.fullmatch(key)
    where = f"'{key}: {value}'"
    if match is None:
        yield f"{where}: expected `- override /data: digits` or `- /model@problems.<name>.module: mlp`. Correct it."
        return
    group = match["group"]
    if not group.startswith("/"):
        yield f"{where}: found the group '{group}' without a slash. Write `- /{key}: {value}`."
    if group.removeprefix("/") == "recipe":
        # Hydra would take it for a second choice beside +recipe=..
        yield f"{where}: found the group 'recipe'; expected the inherited recipe's name alone. Write `- {value}`."
    yield from key_faults(where, group.removeprefix("/"), match["package"])
    yield from _option_faults(where, value)


def _headers(text: str) -> Iterator[str]:
    """Yield the headers of a file; Hydra reads them up to the first line that is none."""
    lines = (line.strip() for line in text.splitlines() if line.strip())
    return takewhile(lambda line: line.startswith("#") and line.lstrip("# ").startswith("@"), lines)


def _header_faults(document: Document) -> Iterator[str]:
    first = next((line.strip() for line in document.text.splitlines() if line.strip()), "")
    if first != PACKAGE_HEADER or set(_headers(document.text)) != {PACKAGE_HEADER}:
        yield f"found '{first[:60]}' as the first line; expected '{PACKAGE_HEADER}' and no other header. Correct it."


def content_faults(data: dict[Any, Any]) -> list[str]:
    """Return what is wrong with the keys and values of a recipe, or of an option in its place; defaults lists aside."""
    # Defaults and Hydra's node have checks of their own.
    content = {key: value for key, value in data.items() if key not in ("defaults", "hydra")}
    faults = list(_root_faults(data))
    if data.get("name") is not None and (fault := name_fault(data["name"])):
        faults.append(fault)
    faults += _key_faults("", content)
    for key, value in leaves(content):
        faults += _value_faults(key, value)
    faults += _logger_faults(value_at(data, "logger.loggers") or [])
    sweep = data.get("sweep") or {}
    if not isinstance(sweep, dict):
        return [*faults, f"sweep: found {sweep!r}; expected keys such as params and num_trials. Write them out."]
    faults += [
        f"sweep.{key}: found {sweep[key]!r}; expected it on the command line alone: sweep.{key}=... Remove it."
        for key in NOT_IN_RECIPES
        if key in sweep
    ]
    return [*faults, *_sweep_faults(sweep.get("params"), "sweep.params")]


def _logger_faults(loggers: Any) -> Iterator[str]:
    """Yield what is wrong with a recipe's loggers: they send nothing away, and touch nothing that is there."""
    for index, node in enumerate(loggers if isinstance(loggers, list) else [loggers]):
        key, target = f"logger.loggers[{index}]", node.get("_target_") if isinstance(node, dict) else node
        if target not in FILE_LOGGERS and not is_of_user(target):
            wanted = f"{' or '.join(FILE_LOGGERS)} in a recipe. Name it on the command line: 'logger.loggers=[..]'"
            yield trust_fault(key, target, "logger") or f"{key}: found {target}, which may upload; expected {wanted}."
        elif "version" in node and not is_of_user(target):
            # Of a version that is there CSVLogger removes the numbers.
            yield f"{key}.version: found {node['version']!r}; expected none, so that a new folder is made. Remove it."


def _root_faults(data: dict[Any, Any]) -> Iterator[str]:
    """Yield the keys at the top that no recipe has: Hydra's but its sweep's choices, and where files are written."""
    for key in data:
        if key != "hydra" and re.split(r"[./]", str(key))[0] == "hydra":
            yield f"found the key '{key}'; expected keys of a recipe. Remove it."
        elif str(key).startswith("_") or not isinstance(key, str):
            yield f"found the key {key!r}; expected one of {', '.join(ROOT_KEYS)}. Remove it."
    if "resume" in data:
        yield "found the key 'resume'; expected it on the command line alone. Remove it, and run with resume=auto."
    if "hydra" in data:
        params = value_at(data, "hydra.sweeper.params")
        if data["hydra"] != {"sweeper": {"params": params}}:
            keys = ", ".join(dict.fromkeys(f"hydra.{key}".partition("[")[0] for key, _ in leaves(data["hydra"])))
            yield f"found {keys or 'hydra'}; expected nothing under hydra but hydra.sweeper.params. Remove it."
        yield from _sweep_faults(params, "hydra.sweeper.params")


def _sweep_faults(params: Any, place: str) -> Iterator[str]:
    """Yield what is wrong with the choices that a recipe's sweep lists."""
    if params is not None and not isinstance(params, dict):
        yield f"{place}: found {params!r}; expected keys with choices. Write `seed: 0,1,2`."
    for key, value in params.items() if isinstance(params, dict) else ():
        where = f"{place}, '{key}'"
        match = _SWEPT_KEY.fullmatch(str(key))
        parts = match["path"].split(".") if match else [""]
        if match is None or parts[0] not in {*ROOT_KEYS, *GROUPS} - {"name", "sweep", "resume"}:
            yield f"{where}: expected a key such as problems.<name>.tasks, not name, sweep or resume. Correct it."
        elif parts[-1] in DANGEROUS or (parts[0] == "logger" and len(parts) > 1):
            yield f"{where}: expected no key that downloads, unpickles, or chooses where files or logs go. Remove it."
        elif match["package"]:
            yield from key_faults(where, match["path"], match["package"])
        if not isinstance(value, str | int | float):
            yield f"{where}: found {value!r}; expected choices in one text. Write `seed: 0,1,2`."
        elif isinstance(value, str) and "{" in value:
            # A mapping could hold what no key here may name, and a reference anything.
            yield f"{where}: found {value!r}; expected values or options, no mappings or references. Sweep each key."
        elif isinstance(value, str):
            yield from [fault for word in _WORDS.split(value) for fault in place_faults(where, word)][:1]


def _key_faults(place: str, node: Any) -> Iterator[str]:
    # Those of a sweep are keys with dots; `_sweep_faults` looks at them.
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        if isinstance(node, dict) and place != "sweep.params" and not _KEY.fullmatch(str(key)):
            yield f"{place or 'top'}: found the key '{key}'; expected ASCII letters, digits, '_' and '-'. Correct it."
        if isinstance(value, dict | list):
            yield from _key_faults(f"{place}[{key}]" if isinstance(node, list) else f"{place}.{key}".lstrip("."), value)


def _value_faults(key: str, value: Any) -> Iterator[str]:
    if is_dangerous(key, value):
        yield (
            f"{key}: found {value!r}; a recipe may not download, unpickle or choose where files go. Remove it, or set "
            "it on the command line: data.download=true."
        )
    yield from boolean_faults(key, value)
    if key == "logger.mode" and value not in (None, *OFFLINE_MODES):
        yield f"{key}: found {value!r}; expected {' or '.join(OFFLINE_MODES)} in a recipe. Set it on the command line."
    if isinstance(value, str):
        yield from _reference_faults(key, value)
        yield from place_faults(key, value)


def _reference_faults(key: str, value: str) -> Iterator[str]:
    """Yield what is wrong with a text that refers to other values."""
    if "${" not in value:
        return
    match = _REFERENCE.fullmatch(value)
    if match is None or (match["default"] and match["resolver"] != "select"):
        yield f"{key}: found {value!r}; expected a single reference, such as ${{data.num_classes}}. Write the value."
    elif not match["dots"] and match["root"] not in ROOT_KEYS:
        yield f"{key}: found {value!r}; expected a reference to one of {', '.join(ROOT_KEYS)}. Correct it."
    elif "." not in key and is_container(key):
        yield f"{key}: found {value!r}; expected its keys written out, so that they can be checked. Write them out."


def place_faults(key: str, value: str) -> Iterator[str]:
    """Yield what is wrong with a text that may be the path of a file: it has to lie below the working folder.

    Args:
        key: where it stands.
        value: the text.
    """
    # `${..seed}` climbs in the config, not on the disk.
    if _OUTSIDE.match(value) or "://" in value or ".." in re.split(r"[/\\]", value):
        wanted = "a path below the working folder, such as datasets/mine"
        yield f"{key}: found {value!r}; expected {wanted}. Write one, or give it on the command line: {key}=.."


def is_dangerous(key: str, value: Any) -> bool:
    """Say whether a value downloads, unpickles or chooses where files go; its key is dotted.

    So is what stands in a list or mapping that is such an argument: `weights[0]`, `loader.x`.
    """
    name, argument = key.rpartition(".")[2], _ARGUMENT.fullmatch(key)
    # A role may be called `weights`; it only names a problem.
    if name in DANGEROUS and not _ROLES.fullmatch(key) and not any(value is allowed for allowed in DANGEROUS[name]):
        return True
    if argument is None or _ROLES.match(key):
        return False
    *above, last = argument["path"].split(".")
    return not DANGEROUS.keys().isdisjoint(part.partition("[")[0] for part in (*above, last if "[" in last else ""))
