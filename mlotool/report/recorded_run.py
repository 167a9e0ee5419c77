"""A run as its folder tells of it: a file that is missing or broken leaves something out, and stops no report."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlotool.config.objective import objective_direction
from mlotool.core.errors import ConfigError, RunFileError
from mlotool.folders.documents import Document
from mlotool.folders.run_folder import STATUSES, RunFolder
from mlotool.report.formats import LARGEST

# What reading the content of a file raises that is not as a run writes it.
UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, OverflowError, MemoryError)


class RecordedRun:
    """What the folder of a run says, each file parsed when it is asked for, and empty where it could not be read.

    Args:
        folder: of the run.

    Attributes:
        notes: what was missing or unreadable, for the reader.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder, self.notes = folder, list[str]()

    def _read(self, name: str, read: Callable[[], Any], empty: Any) -> Any:
        try:
            content = read()
        except ConfigError as error:
            self.notes.append(f"{name} could not be read: {error}")
            return empty
        if content is None:
            self.notes.append(f"{name} is missing.")
        return empty if content is None else content

    def _json(self, name: str) -> dict[str, Any]:
        return dict(self._read(name, lambda: self.folder.json(name), {}))

    @cached_property
    def summary(self) -> dict[str, Any]:
        """status, objective, metrics, best, error."""
        return self._json(RunFolder.SUMMARY)

    @cached_property
    def provenance(self) -> dict[str, Any]:
        """command, git, versions, platform, device, seed, times."""
        return self._json(RunFolder.PROVENANCE)

    @property
    def job(self) -> dict[str, Any]:
        """What a job of a sweep was to run."""
        return self._json(RunFolder.JOB)

    @cached_property
    def document(self) -> Document:
        """The text and the values of config.yaml."""
        document: Document = self._read(RunFolder.CONFIG, self.folder.config, Document(self.folder.path, "", {}))
        return document

    @property
    def config(self) -> dict[str, Any]:
        """The resolved config."""
        return self.document.data

    @property
    def recipe(self) -> str:
        """The recipe's own file."""
        return str(self._read(RunFolder.RECIPE, lambda: self.folder.text(RunFolder.RECIPE) or "", ""))

    @property
    def overrides(self) -> list[str]:
        """The command line's overrides."""
        return list(self._read(RunFolder.OVERRIDES, self.folder.overrides, []))

    @property
    def problems(self) -> dict[str, dict[str, Any]]:
        """The problems' configs by name, in the recipe's order."""
        return {str(name): as_dict(value) for name, value in as_dict(self.config.get("problems")).items()}

    @property
    def name(self) -> str:
        """The recipe's name, or else the folder's; a control says so."""
        name = self.config.get("name")
        if not name and self.provenance.get("recipe_path"):
            name = Path(str(self.provenance["recipe_path"])).stem
        control = ", control" if self.config.get("baseline") == "fixed" else ""
        return f"{name or self.folder.path.resolve().name}{control}"

    @property
    def status(self) -> str:
        """finished, pruned, failed, infeasible, interrupted, or unknown where there is no summary."""
        status = self.summary.get("status")
        return status if status in STATUSES else "unknown"

    @property
    def objective(self) -> dict[str, Any]:
        """key, value and mode of the objective, as far as they are known."""
        objective = {"key": self.config.get("objective"), **as_dict(self.summary.get("objective"))}
        # What is known of the key counts before what a summary says.
        key = objective["key"] or self.config.get("objective")
        mode = objective.get("mode") or self.config.get("objective_mode")
        return objective | {"mode": objective_direction({**self.config, "objective": key, "objective_mode": mode})}

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


def as_dict(value: Any) -> dict[Any, Any]:
    """Return the value where it is a mapping, and else an empty one."""
    return value if isinstance(value, dict) else {}


SPLIT_NAMES = ("train", "meta", "val", "valid", "validation", "test")


@dataclass(frozen=True)
class Series:
    """One logged key.

    Args:
        owner: the problem, split or analysis before the slash.
        metric: what stands after it.
        ticks: increasing, [n].
        values: NaN where the value was not finite, [n].
    """

    owner: str
    metric: str
    ticks: NDArray[np.float64]
    values: NDArray[np.float64]

    @property
    def key(self) -> str:
        """The key of metrics.csv."""
        return f"{self.owner}/{self.metric}"

    @property
    def finite(self) -> NDArray[np.float64]:
        """The values that can be drawn."""
        return self.values[~np.isnan(self.values)]

    @property
    def not_finite(self) -> NDArray[np.float64]:
        """The ticks whose value cannot be drawn."""
        return self.ticks[np.isnan(self.values)]


def read_series(folder: RunFolder) -> tuple[list[Series], list[str]]:
    """Return one series a key of metrics.csv, in order of appearance, and notes on what could not be read."""
    try:
        points, notes = folder.metrics()
    except RunFileError as error:
        return [], [str(error)]
    return [_series(key, values) for key, values in points.items()], notes


def _series(key: str, points: dict[float, float]) -> Series:
    owner, slash, metric = key.partition("/")
    ticks, values = (np.array(list(numbers), dtype=np.float64) for numbers in (points, points.values()))
    order = np.argsort(ticks, kind="stable")
    values[~(np.abs(values) < LARGEST)] = np.nan
    return Series(owner if slash else "", metric if slash else key, ticks[order], values[order])


def read_artifacts(
    folder: RunFolder, suffix: str, max_files: int, read: Callable[[str], Any]
) -> tuple[list[Any], list[str]]:
    """Read the files artifacts/*<suffix> of a run folder.

    Args:
        folder: of the run.
        suffix: of the files.
        max_files: how many are looked at.
        read: returns what a file holds, None where that is nothing to be drawn.

    Returns:
        what was read, and a note for each file that could not be.
    """
    contents, notes = [], []
    try:
        names = folder.artifact_names(suffix, max_files)
    except RunFileError as error:
        return [], [str(error)]
    for name in names:
        try:
            contents.append(read(name))
        except (RunFileError, *UNREADABLE) as error:
            notes.append(f"{name} could not be drawn: {error}")
    return [content for content in contents if content is not None], notes
