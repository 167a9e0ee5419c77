"""The recipes there are, and the options of the config groups: conf/<group>/<name>.yaml. No Hydra here."""

import os
from dataclasses import dataclass
from filecmp import cmp
from itertools import islice, takewhile
from pathlib import Path

from mlotool.config.schema import OPTION_GROUPS
from mlotool.core.errors import ConfigError
from mlotool.core.messages import did_you_mean
from mlotool.core.user_code import nearby
from mlotool.folders.files import at_home, package_dir
from mlotool.folders.run_folder import RunFolder

# The config group of recipes: `+recipe=<name>`.
GROUP = "recipe"

SUFFIX = ".yaml"
# Folders of recipe files that were named by their path; they come first. `register_sources` sets them.
named_folders: list[Path] = []


def recipe_folders() -> list[tuple[str, Path]]:
    """Return where recipes are looked for, in that order, as `(source, folder)`."""
    places = [("file", folder) for folder in named_folders]
    places += [("./recipes", Path.cwd() / "recipes"), ("built-in", package_dir("recipes"))]
    known: dict[Path, str] = {}
    for source, folder in places:
        if folder.is_dir():
            known.setdefault(folder, source)
    return [(source, folder) for folder, source in known.items()]


def recipe_file(folder: Path, name: str) -> Path | None:
    """Return the file of recipe `name` in `folder`; None where there is none, or where it or its link leads outside."""
    if not is_literal(name):
        return None
    path = Path(os.path.normpath(folder / (name if name.endswith(SUFFIX) else name + SUFFIX)))
    return path if path.is_relative_to(folder) and path.is_file() and is_inside(path, folder) else None


def is_literal(name: str) -> bool:
    """Say whether Hydra takes a name as it stands: `${oc.env:HOME}` it would resolve, and the name would tell."""
    return "$" not in name and "\\" not in name


def is_inside(path: Path, folder: Path) -> bool:
    """Say whether a file lies in a folder with all links followed."""
    return path.resolve().is_relative_to(folder.resolve())


_MAX_NAMES = 500
# Characters of a file that are read for its summary and task.
_HEADER = 4_000
_TASK = "Task:"
# What a header's line `# Task:` says in the built-in recipes, in the order of `mlotool list`.
TASKS = (
    "data reweighting and cleaning",
    "hyperparameters",
    "meta-learning",
    "architecture search",
    "domain adaptation",
    "poisoning",
    "layer-parallel training",
    "baselines",
)


@dataclass(frozen=True)
class RecipeInfo:
    """A recipe that `+recipe=<name>` finds.

    Args:
        name: as in `+recipe=<name>`.
        path: its file.
        source: "built-in", "./recipes", or "file" for the folder of a file that was named by its path.
        summary: the first line of its header.
        task: what its header's line `# Task:` says, one of TASKS in a built-in recipe; "" where it has none.
    """

    name: str
    path: Path
    source: str
    summary: str
    task: str = ""


def list_recipes() -> list[RecipeInfo]:
    """Return the recipes by name; one that is hidden by another of its name is left out."""
    by_name: dict[str, RecipeInfo] = {}
    for source, folder in recipe_folders():
        for path in sorted(folder.rglob(f"*{SUFFIX}")):
            name = path.relative_to(folder).with_suffix("").as_posix()
            is_hidden = any(part.startswith((".", "_")) for part in name.split("/"))
            if not is_hidden and recipe_file(folder, name) is not None:
                by_name.setdefault(name, RecipeInfo(name, path, source, *_summary_and_task(path)))
    return sorted(by_name.values(), key=lambda recipe: recipe.name)


def find_recipe(name: str) -> Path:
    """Return the file of recipe `name`.

    Raises:
        ConfigError: there is none.
    """
    for _, folder in recipe_folders():
        path = recipe_file(folder, name)
        if path is not None:
            return path
    raise unknown_recipe(name)


def unknown_recipe(name: str) -> ConfigError:
    """Return the error for a recipe that is not there."""
    if RunFolder(name).has(RunFolder.CONFIG):
        return ConfigError(
            f"recipe: found '{name}', the folder of a run; expected a recipe. {what_to_do_with_a_run(name)}"
        )
    hint = did_you_mean(name, [recipe.name for recipe in list_recipes()])
    folders = ", ".join(str(folder) for _, folder in recipe_folders())
    return ConfigError(
        f"recipe: found '{name}', which is not in {folders}.{hint} Run `mlotool list`, or give the path of a file: "
        "mlotool run path/to/recipe.yaml."
    )


def what_to_do_with_a_run(folder: Path | str) -> str:
    """Return the commands that take a run's folder, for who has given it as a recipe."""
    place = Path(nearby(str(folder)))
    recipe, overrides = place / RunFolder.RECIPE, place / RunFolder.OVERRIDES
    return (
        f"To run it again: mlotool run {recipe}, with the overrides in {overrides}. To resume it: the same command "
        f"with resume={place}. To evaluate it: mlotool evaluate {place} --split test."
    )


def recipe_argument(recipe: str | None) -> tuple[list[str], list[Path]]:
    """Return what a recipe's name or path is as an override, and the folder to look in for it."""
    if recipe is None:
        return [], []
    if not recipe.endswith((SUFFIX, ".yml")) and not Path(recipe).is_absolute():
        find_recipe(recipe)
        return [f"+{GROUP}={quoted(recipe)}"], []
    if "://" in recipe:
        raise ConfigError(
            f"recipe: found '{recipe}'; expected a name or a file. Write: mlotool copy {recipe} mine.yaml"
        )
    path = Path(os.path.normpath(at_home(recipe).absolute()))
    if not is_literal(str(path)):
        raise ConfigError(f"recipe: found '{recipe}'; expected a path without '$' and backslashes. Rename it.")
    if path.suffix != SUFFIX or not path.is_file():
        siblings = [str(other) for other in path.parent.glob(f"*{SUFFIX}")]
        raise ConfigError(
            f"recipe: found '{recipe}'; expected a file that is there and ends in {SUFFIX}."
            f"{did_you_mean(str(path), siblings)} Correct the path, or run `mlotool list` for the names of recipes."
        )
    if not is_inside(path, path.parent):
        raise ConfigError(f"recipe: found '{recipe}', a link to {path.resolve()}. Give the path of the file itself.")
    return [f"+{GROUP}={quoted(path.stem)}"], [path.parent]


def quoted(value: str) -> str:
    """Return a value as Hydra's grammar wants it: it reads spaces, commas and brackets."""
    if all(character.isalnum() or character in "_-./" for character in value):
        return value
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _summary_and_task(path: Path) -> tuple[str, str]:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            lines = file.read(_HEADER).splitlines()
    except OSError:
        return "", ""
    header = [line.lstrip("#").strip() for line in takewhile(lambda line: line.startswith("#"), lines)]
    # A line may be an editor's, of the recipe's JSON schema.
    summaries = (line for line in header if line and not line.startswith(("@", _TASK, "yaml-language-server:")))
    tasks = (line.removeprefix(_TASK).strip() for line in header if line.startswith(_TASK))
    return next(summaries, ""), next(tasks, "")


# Of the user's options, below the working folder, which may be a stranger's.
FOLDER = Path("conf")

_MAX_FOLDERS = 100
# Folders of options that the command line names: they come before ./conf, and are trusted.
command_line_folders: list[Path] = []


def options_folder() -> Path | None:
    """Return ./conf; None where there is none, or where it is the built-in one, as in a checkout of mlotool."""
    built_in = package_dir("conf")
    return FOLDER if FOLDER.is_dir() and not (built_in.is_dir() and FOLDER.samefile(built_in)) else None


def built_in_option(group: str, name: str) -> Path | None:
    """Return the file of a built-in option; None where there is none of that name."""
    file = package_dir("conf") / group / f"{name}{SUFFIX}"
    return file if file.is_file() else None


def own_option(group: str, name: str) -> Path | None:
    """Return the file of an option in ./conf; None where there is none, it is a link, or the command line names one."""
    if options_folder() is None or group not in OPTION_GROUPS or "/" in name or name.startswith("."):
        return None
    if any((folder / group / f"{name}{SUFFIX}").is_file() for folder in command_line_folders):
        return None
    return recipe_file(FOLDER, f"{group}/{name}")


def option_file(group: str, name: str) -> Path | None:
    """Return the file of an option, a built-in or an own one."""
    return built_in_option(group, name) or own_option(group, name)


def own_options(group: str) -> list[str]:
    """Return the names of the user's options of a group."""
    return sorted(name for name in _names(FOLDER / group) if own_option(group, name) is not None)[:_MAX_NAMES]


def option_names(group: str) -> list[str]:
    """Return the names of all options of a group."""
    return sorted({*_names(package_dir("conf") / group), *own_options(group)})


def surplus_folders() -> list[Path]:
    """Return the folders in ./conf that are no group's."""
    folder = options_folder()
    entries = [] if folder is None else sorted(islice(folder.iterdir(), _MAX_FOLDERS))
    return [entry for entry in entries if entry.is_dir() and entry.name not in OPTION_GROUPS]


def check_name(group: str, name: str) -> None:
    """Refuse an option of the user's that has the name of a built-in one, unless it is a copy of it.

    Raises:
        ConfigError: which of them is meant cannot be known.
    """
    file, built_in = own_option(group, name), built_in_option(group, name)
    if file is not None and built_in is not None and not cmp(file, built_in, shallow=False):
        other = file.with_stem(f"my_{name}")
        raise ConfigError(f"{group}={name}: found {file}, a built-in option's name. Rename it, e.g. to {other}.")


def _names(folder: Path) -> list[str]:
    files = folder.glob(f"*{SUFFIX}") if folder.is_dir() else ()
    return [file.stem for file in files if not file.name.startswith((".", "_"))]
