"""The packages that the user trusts for good: trust.json in the user's own config folder, never in a working folder.

A package is remembered with its place on the disk, as it is found and with all links followed. Another package of the
same name, or the same one behind a link, is another place.
"""

import json
import os
from pathlib import Path
from typing import NamedTuple

from mlotool.core.errors import ConfigError
from mlotool.folders import files, safe_files

FILE = "trust.json"


class Place(NamedTuple):
    """Where a package lies: its `__init__.py`, or the file of a module.

    Args:
        found: its absolute path, as the import path leads to it.
        file: the same with all links followed.
    """

    found: str
    file: str

    @classmethod
    def of(cls, file: Path) -> "Place":
        """Return the place of a file."""
        return cls(os.path.abspath(file), os.path.realpath(file))  # noqa: PTH100 - which follows no links

    @property
    def folder(self) -> Path:
        """The folder on the import path in which it lies."""
        path = Path(self.found)
        return path.parent.parent if path.name == "__init__.py" else path.parent


def settings_folder() -> Path | None:
    """Return `$XDG_CONFIG_HOME/mlotool`, or `~/.config/mlotool`; None where neither is an absolute path.

    A relative one would lie in the working folder, which may be a stranger's.
    """
    homes = (os.environ.get("XDG_CONFIG_HOME", ""), str(files.at_home("~/.config")))
    home = next((path for path in map(Path, homes) if path.is_absolute()), None)
    return None if home is None else home / "mlotool"


def read_places() -> dict[str, list[Place]]:
    """Return the remembered places by package.

    Raises:
        RunFileError: the file is none that `mlotool trust` has written.
    """
    folder = settings_folder()
    content = {} if folder is None else safe_files.read_json(folder, FILE) or {}
    places: dict[str, list[Place]] = {}
    for package, listed in content.items():
        pairs = [pair for pair in listed if isinstance(pair, list)] if isinstance(listed, list) else []
        places[package] = [Place(*pair) for pair in pairs if len(pair) == 2 and all(isinstance(x, str) for x in pair)]
    return places


def write_places(places: dict[str, list[Place]]) -> Path:
    """Write them, and return the file.

    Raises:
        ConfigError: no folder of the user's is known.
        WriteError: the disk does not take it.
    """
    folder = settings_folder()
    if folder is None:
        raise ConfigError(
            "trust: found no absolute path in XDG_CONFIG_HOME or HOME; expected the user's config folder. Set one."
        )
    with files.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    content = {package: [list(place) for place in listed] for package, listed in sorted(places.items()) if listed}
    files.write_text(folder / FILE, json.dumps(content, indent=2) + "\n")
    return folder / FILE
