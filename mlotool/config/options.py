"""Options of the user's: conf/<group>/<name>.yaml of the working folder, beside the built-in ones. No Hydra here.

The working folder may be a stranger's: what such a file says is held to the rules for recipes.
"""

from collections.abc import Iterator
from filecmp import cmp
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from mlotool.config.reading import MAX_RECIPE_NODES, Document, read_document
from mlotool.config.recipes import SUFFIX, package_dir, recipe_file
from mlotool.config.safety import content_faults
from mlotool.config.schema import OPTION_GROUPS
from mlotool.core.errors import ConfigError
from mlotool.core.messages import fault_list

FOLDER = Path("conf")
"""Below the working folder."""

TARGET_GROUPS = ("data", "model", "optimizer", "hypergradient", "parallel")
"""Groups whose options are built by their `_target_`; those of the others have the schema's keys."""

_MAX_NAMES, _MAX_FOLDERS = 500, 100
command_line_folders: list[Path] = []
"""Folders of options that the command line names: they come before ./conf, and are trusted."""


def options_folder() -> Path | None:
    """Return ./conf; None where there is none, or where it is the built-in one, as in a checkout of mlotool."""
    built_in = package_dir("conf")
    return FOLDER if FOLDER.is_dir() and not (built_in.is_dir() and FOLDER.samefile(built_in)) else None


def option_file(group: str, name: str) -> Path | None:
    """Return the file of an option in ./conf; None where there is none, it is a link, or the command line names one."""
    if options_folder() is None or group not in OPTION_GROUPS or "/" in name or name.startswith("."):
        return None
    if any((folder / group / f"{name}{SUFFIX}").is_file() for folder in command_line_folders):
        return None
    return recipe_file(FOLDER, f"{group}/{name}")


def own_options(group: str) -> list[str]:
    """Return the names of the user's options of a group."""
    return sorted(name for name in _names(FOLDER / group) if option_file(group, name) is not None)[:_MAX_NAMES]


def option_names(group: str) -> list[str]:
    """Return the names of all options of a group."""
    return sorted({*_names(package_dir("conf") / group), *own_options(group)})


def is_built_in(group: str, name: str) -> bool:
    """Say whether there is a built-in option of that name."""
    return (package_dir("conf") / group / f"{name}{SUFFIX}").is_file()


def surplus_folders() -> list[Path]:
    """Return the folders in ./conf that are no group's."""
    folder = options_folder()
    entries = [] if folder is None else sorted(islice(folder.iterdir(), _MAX_FOLDERS))
    return [each for each in entries if each.is_dir() and each.name not in OPTION_GROUPS]


def read_option(group: str, file: Path, *, is_fast: bool = False) -> Document:
    """Read the file of an option.

    Raises:
        ConfigError: it is none, or has what an option cannot have wherever it is placed.
    """
    document = read_document(file, is_fast=is_fast, max_nodes=MAX_RECIPE_NODES)
    faults = list(_form_faults(group, document))
    if faults:
        raise ConfigError(fault_list([f"{file}: {fault}" for fault in faults]))
    return document


def check_placed(file: Path, content: dict[Any, Any]) -> None:
    """Refuse of an option what a recipe may not say either.

    Args:
        file: of the option.
        content: what it sets, from the root of the config on.

    Raises:
        ConfigError: with every fault.
    """
    faults = content_faults(Document(file, "", content))
    if faults:
        raise ConfigError(fault_list([f"{file}: {fault}" for fault in faults]))


def check_total(num_nodes: int) -> None:
    """Refuse more values in all options of ./conf that one config chooses than a recipe may have."""
    if num_nodes > MAX_RECIPE_NODES:
        raise ConfigError(
            f"{FOLDER}: found more than {MAX_RECIPE_NODES} values in the options that were chosen from it; expected at "
            f"most {MAX_RECIPE_NODES} together. Choose fewer of them, or write smaller ones."
        )


def check_name(group: str, name: str) -> None:
    """Refuse an option of the user's that has the name of a built-in one, unless it is a copy of it.

    Raises:
        ConfigError: which of them is meant cannot be known.
    """
    file = option_file(group, name)
    if file is not None and not cmp(file, package_dir("conf") / group / file.name, shallow=False):
        raise ConfigError(
            f"{group}={name}: found {file}, which has the name of a built-in option; expected a name of its own, so "
            f"that {group}={name} means the same everywhere. Rename it, e.g. to {file.with_stem(f'my_{name}')}."
        )


def _names(folder: Path) -> list[str]:
    files = folder.glob(f"*{SUFFIX}") if folder.is_dir() else ()
    return [file.stem for file in files if not file.name.startswith((".", "_"))]


def _form_faults(group: str, document: Document) -> Iterator[str]:
    lines = (line.strip() for line in document.text.splitlines() if line.strip())
    # Hydra reads headers up to the first line that is none.
    for header in takewhile(lambda line: line.startswith("#") and line.lstrip("# ").startswith("@"), lines):
        yield (
            f"found the header '{header[:60]}'; expected none, as the choice says where an option goes. Remove it, and "
            f"write the keys without '{group}:' above them."
        )
    if "defaults" in document.data:
        yield (
            "found the key 'defaults'; expected the option's own keys, all of them, as options of yours inherit from "
            "none. Write them out, or choose the other option in a recipe and change its keys there."
        )
    elif not document.data:
        yield f"found no keys; expected those of an option of {group}. {_example(group)}"
    elif group in TARGET_GROUPS and "_target_" not in document.data:
        yield f"found no key '_target_'; expected the class or function that is called. {_example(group)}"


def _example(group: str) -> str:
    if group not in TARGET_GROUPS:
        return f"Write `key: value` lines; see {package_dir('conf') / group}."
    return f"Write `_target_: ...` and its arguments, as the built-in options do; see {package_dir('conf') / group}."
