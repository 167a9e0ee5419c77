"""What a run folder holds, read so that no missing or broken file stops the report."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlotool.config.objective import is_wrong_way_round, objective_direction
from mlotool.config.run_config import read_run_config
from mlotool.core.errors import ConfigError, RunFileError
from mlotool.core.run_files import MAX_TEXT_BYTES, read_json, read_text

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
        """finished, pruned, failed, infeasible, interrupted, or unknown where there is no summary."""
        status = self.summary.get("status")
        return status if status in ("finished", "pruned", "failed", "infeasible", "interrupted") else "unknown"

    @property
    def objective(self) -> dict[str, Any]:
        """key, value and mode of the objective, as far as they are known."""
        found = dict(as_dict(self.summary.get("objective")))
        found.setdefault("key", self.config.get("objective"))
        found["mode"] = objective_direction(self._judged(found.get("mode")))
        return found

    def _judged(self, mode: object) -> dict[str, Any]:
        # What is known of the key counts before what a summary says: older runs could be told the wrong direction.
        key = as_dict(self.summary.get("objective")).get("key") or self.config.get("objective")
        return {**self.config, "objective": key, "objective_mode": mode or self.config.get("objective_mode")}

    @property
    def is_wrong_way_round(self) -> bool:
        """Whether the best checkpoint was chosen by the wrong direction, as older versions allowed."""
        return is_wrong_way_round(self.config)

    @property
    def wrong_way_note(self) -> str:
        """What is said then."""
        return (
            f"objective_mode is {self.config['objective_mode']}, and {self.objective['mode']} is better for "
            f"{self.config['objective']}: what is called the best checkpoint is that of the worst evaluation. Use "
            "checkpoints/last.ckpt, or run the recipe again."
        )

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
    run.config_text, run.config = _config(run)
    run.recipe_text = _text(run, "recipe.yaml")
    run.overrides = tuple(line.strip() for line in _text(run, "overrides.txt").splitlines() if line.strip())
    run.summary = _mapping(run, "summary.json")
    run.provenance = _mapping(run, "provenance.json")
    if run.is_wrong_way_round:
        run.notes.append(run.wrong_way_note)
    return run


def refuse_foreign(path: Path) -> None:
    """Raise ConfigError where the folder is another program's, which has a config.yaml as well."""
    if not path.is_dir() or (path / "provenance.json").exists():
        return
    try:
        document = read_run_config(path)
    except ConfigError:
        return
    if document is not None and document.data and "problems" not in document.data:
        raise ConfigError(
            f"'{path}' is not the folder of a run: its config.yaml has no problems, and there is no provenance.json; "
            "expected what `mlotool run` has written. Give the folder that it printed, outputs/<name>/<date>_<time>."
        )


def as_dict(value: Any) -> dict[Any, Any]:
    """Return the value where it is a mapping, and else an empty one."""
    return value if isinstance(value, dict) else {}


def _listing(path: Path) -> str:
    names = sorted(entry.name for entry in path.iterdir())
    if not names:
        return "an empty folder"
    return "a folder with " + ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _text(run: RunFolder, name: str) -> str:
    try:
        return read_text(run.path, name, MAX_TEXT_BYTES) or ""
    except RunFileError as error:
        run.notes.append(str(error))
        return ""


def _config(run: RunFolder) -> tuple[str, dict[str, Any]]:
    try:
        document = read_run_config(run.path)
    except ConfigError as error:
        run.notes.append(f"config.yaml could not be read: {error}")
        return "", {}
    if document is None:
        run.notes.append("config.yaml is missing.")
        return "", {}
    return document.text, document.data


def _mapping(run: RunFolder, name: str) -> dict[str, Any]:
    try:
        found = read_json(run.path, name)
    except RunFileError as error:
        run.notes.append(f"{name} could not be read: {error}")
        return {}
    if found is None:
        run.notes.append(f"{name} is missing.")
    return found or {}
