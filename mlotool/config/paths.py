"""Where the built-in conf/ and recipes/ lie, and where else recipes are looked for. No Hydra: completion asks."""

import os
from pathlib import Path

GROUP = "recipe"
"""The config group of recipes: `+recipe=<name>`."""

SUFFIX = ".yaml"
named_folders: list[Path] = []
"""Folders of recipe files that were named by their path; they come first. `register_sources` sets them."""


def package_dir(name: str) -> Path:
    """Return the folder of the built-in `conf` or `recipes`.

    Args:
        name: "conf" or "recipes". In a wheel they lie inside the package, in a checkout beside it.
    """
    package = Path(__file__).resolve().parents[1]
    return next((home / name for home in (package, package.parent) if (home / name).is_dir()), package / name)


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
