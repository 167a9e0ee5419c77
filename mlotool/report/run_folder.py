"""What a run folder holds, read so that no missing or broken file stops the report."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mlotool.core.errors import ConfigError

MARKS = ("summary.json", "config.yaml", "metrics.csv", "provenance.json")


@dataclass
class RunFolder:
    """The files of a run, parsed.

    Args:
        path: the folder.
        config: the resolved config; empty where it could not be read.
        summary: status, objective, metrics, best, error.
        provenance: command, git, versions, platform, device, seed, times.
        config_text: config.yaml as it stands.
        recipe_text: recipe.yaml as it stands.
        overrides: the command line's overrides.
        notes: what was missing or unreadable, for the reader.
    """

    path: Path
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    config_text: str = ""
    recipe_text: str = ""
    overrides: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)

    @property
    def problems(self) -> dict[str, dict[str, Any]]:
        """The problems' configs by name, in the recipe's order."""
        return {str(name): as_dict(value) for name, value in as_dict(self.config.get("problems")).items()}

    @property
    def name(self) -> str:
        """The recipe's name, or else the folder's."""
        name = self.config.get("name")
        if not name and self.provenance.get("recipe_path"):
            name = Path(str(self.provenance["recipe_path"])).stem
        return str(name or self.path.resolve().name)

    @property
    def status(self) -> str:
        """finished, pruned, failed, interrupted, or unknown where there is no summary."""
        status = self.summary.get("status")
        return status if status in ("finished", "pruned", "failed", "interrupted") else "unknown"

    @property
    def objective(self) -> dict[str, Any]:
        """key, value and mode of the objective, as far as they are known."""
        found = dict(as_dict(self.summary.get("objective")))
        found.setdefault("key", self.config.get("objective"))
        found.setdefault("mode", self.config.get("objective_mode"))
        return found

    @property
    def metrics(self) -> dict[str, Any]:
        """The last value by key."""
        return as_dict(self.summary.get("metrics"))

    @property
    def best_tick(self) -> int | None:
        """The tick of the best checkpoint."""
        tick = as_dict(self.summary.get("best")).get("tick")
        return int(tick) if isinstance(tick, int | float) and tick == tick and abs(tick) < 1e15 else None

    @property
    def best_metrics(self) -> dict[str, Any]:
        """The metrics of the best checkpoint by key."""
        return as_dict(as_dict(self.summary.get("best")).get("metrics"))


def is_run_folder(path: Path) -> bool:
    """Return whether the folder holds one of the files that every run writes."""
    return path.is_dir() and any((path / mark).is_file() for mark in MARKS)


def read_run_folder(path: Path) -> RunFolder:
    """Read a run folder.

    Raises:
        ConfigError: `path` is no run folder.
    """
    if not is_run_folder(path):
        found = "no such folder" if not path.exists() else "a file" if path.is_file() else _listing(path)
        raise ConfigError(
            f"'{path}' is not the folder of a run: found {found}; expected a folder with one of {', '.join(MARKS)}. "
            "Give the folder that `mlotool run` printed, outputs/<name>/<date>_<time>."
        )
    run = RunFolder(path)
    run.config_text = _read_text(run, "config.yaml", needed=True)
    run.recipe_text = _read_text(run, "recipe.yaml", needed=False)
    overrides = _read_text(run, "overrides.txt", needed=False)
    run.overrides = tuple(line.strip() for line in overrides.splitlines() if line.strip())
    run.config = _parsed(run, "config.yaml", run.config_text, yaml.safe_load)
    run.summary = _parsed(run, "summary.json", _read_text(run, "summary.json", needed=True), json.loads)
    run.provenance = _parsed(run, "provenance.json", _read_text(run, "provenance.json", needed=True), json.loads)
    return run


def as_dict(value: Any) -> dict[Any, Any]:
    """Return the value where it is a mapping, and else an empty one."""
    return value if isinstance(value, dict) else {}


def _listing(path: Path) -> str:
    names = sorted(entry.name for entry in path.iterdir())
    if not names:
        return "an empty folder"
    return "a folder with " + ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _read_text(run: RunFolder, name: str, *, needed: bool) -> str:
    file = run.path / name
    if not file.is_file():
        if needed:
            run.notes.append(f"{name} is missing.")
        return ""
    return file.read_text(encoding="utf-8", errors="replace")


def _parsed(run: RunFolder, name: str, text: str, parse: Callable[[str], Any]) -> dict[str, Any]:
    if not text:
        return {}
    try:
        value = parse(text)
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError, yaml.YAMLError) as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        run.notes.append(f"{name} could not be read: {first_line}")
        return {}
    if not isinstance(value, dict):
        run.notes.append(f"{name} holds no mapping.")
    return as_dict(value)
