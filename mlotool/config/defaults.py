"""Defaults lists of recipes: they may choose options of our groups and inherit recipes, nothing else."""

import re
from collections.abc import Iterator
from typing import Any

from mlotool.config.schema import GROUPS, MISSING, ROOT_KEYS
from mlotool.core.messages import did_you_mean

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
