"""What a run folder holds, read within limits, and so that no missing or broken file stops the report."""

import zipfile
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlotool.config.objective import objective_direction
from mlotool.config.reading import Document
from mlotool.config.run_config import read_run_config
from mlotool.core.errors import ConfigError, RunFileError
from mlotool.core.run_files import MAX_METRICS_BYTES, MAX_TEXT_BYTES, list_files, open_file, read_json, read_text
from mlotool.report.formats import LARGEST

MARKS = ("summary.json", "metrics.csv", "provenance.json")
# What reading the content of a file raises that is not as a run writes it.
UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, OverflowError, MemoryError)


class RunFolder:
    """The files of a run, each parsed when it is asked for, and empty where it could not be read.

    Args:
        path: the folder.

    Attributes:
        notes: what was missing or unreadable, for the reader.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.notes = path, list[str]()

    def _read(self, name: str, read: Callable[[], Any], empty: Any) -> Any:
        try:
            content = read()
        except ConfigError as error:
            self.notes.append(f"{name} could not be read: {error}")
            return empty
        if content is None and name not in ("recipe.yaml", "overrides.txt"):
            self.notes.append(f"{name} is missing.")
        return empty if content is None else content

    @cached_property
    def document(self) -> Document:
        """The text and the values of config.yaml."""
        empty = Document(self.path, "", {})
        document: Document = self._read("config.yaml", lambda: read_run_config(self.path), empty)
        return document

    @cached_property
    def summary(self) -> dict[str, Any]:
        """status, objective, metrics, best, error."""
        return self.json("summary.json")

    @cached_property
    def provenance(self) -> dict[str, Any]:
        """command, git, versions, platform, device, seed, times."""
        return self.json("provenance.json")

    def json(self, name: str) -> dict[str, Any]:
        """Return the mapping that a JSON file holds."""
        return dict(self._read(name, lambda: read_json(self.path, name), {}))

    def text(self, name: str) -> str:
        """Return a text file as it stands."""
        return str(self._read(name, lambda: read_text(self.path, name, MAX_TEXT_BYTES), ""))

    @property
    def config(self) -> dict[str, Any]:
        """The resolved config."""
        return self.document.data

    @property
    def overrides(self) -> list[str]:
        """The command line's overrides."""
        return [line.strip() for line in self.text("overrides.txt").splitlines() if line.strip()]

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


def is_run_folder(path: Path) -> bool:
    """Return whether the folder holds one of the files that every run writes."""
    return path.is_dir() and any((path / mark).is_file() for mark in MARKS)


def read_run_folder(path: Path) -> RunFolder:
    """Return a run folder.

    Raises:
        ConfigError: `path` is no run folder.
    """
    if not is_run_folder(path):
        found = "another folder" if path.is_dir() else "a file" if path.exists() else "no such folder"
        raise ConfigError(
            f"'{path}' is not the folder of a run: found {found}; expected a folder with one of {', '.join(MARKS)}. "
            "Give the folder that `mlotool run` printed, outputs/<name>/<date>_<time>."
        )
    return RunFolder(path)


def as_dict(value: Any) -> dict[Any, Any]:
    """Return the value where it is a mapping, and else an empty one."""
    return value if isinstance(value, dict) else {}


SPLIT_NAMES = ("train", "meta", "val", "valid", "validation", "test")
# Of metrics.csv, so that a page is there in seconds; three million usual lines have as many bytes.
MAX_BYTES, MAX_KEYS, LARGEST_TICK = 100_000_000, 1_000, 1e15


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


def read_series(run_dir: Path) -> tuple[list[Series], list[str]]:
    """Read metrics.csv (tick,key,value) of a run folder.

    Returns:
        one series a key in order of appearance, and notes on what could not be read.
    """
    try:
        with open_file(run_dir, "metrics.csv", MAX_METRICS_BYTES) as file:
            text, is_cut = file.read(MAX_BYTES).decode("utf-8", errors="replace"), bool(file.read(1))
    except FileNotFoundError:
        return [], []
    except RunFileError as error:
        return [], [str(error)]
    points: dict[str, dict[float, float]] = {}
    num_bad = 0
    for line in text.splitlines():
        first, _, rest = line.partition(",")
        key, _, last = rest.rpartition(",")
        try:
            tick, value = float(first), float(last)
        except ValueError:
            num_bad += line not in ("", "tick,key,value")
            continue
        key = key.strip('"').replace('""', '"')
        if abs(tick) < LARGEST_TICK and (key in points or len(points) < MAX_KEYS):
            # A resumed run logs some ticks again: the later value counts.
            points.setdefault(key, {})[tick] = value
        else:
            num_bad += 1
    notes = [f"metrics.csv has {num_bad} line{'s' if num_bad > 1 else ''} that could not be read."] if num_bad else []
    if is_cut:
        notes.append(f"metrics.csv has more than {MAX_BYTES} bytes; what comes after those is left out.")
    return [_series(key, values) for key, values in points.items()], notes


def _series(key: str, points: dict[float, float]) -> Series:
    owner, slash, metric = key.partition("/")
    ticks, values = (np.array(list(numbers), dtype=np.float64) for numbers in (points, points.values()))
    order = np.argsort(ticks, kind="stable")
    values[~(np.abs(values) < LARGEST)] = np.nan
    return Series(owner if slash else "", metric if slash else key, ticks[order], values[order])


# Of a .npz file, packed and unpacked: ten million samples.
MAX_FILE_BYTES, MAX_ARRAY_BYTES = 200_000_000, 400_000_000


def read_arrays(run_dir: Path, name: str, needed: Collection[str], wanted: Collection[str]) -> dict[str, NDArray[Any]]:
    """Return some arrays of a .npz file; none where it lacks one that is needed. Nothing in it is executed.

    Args:
        run_dir: the run folder.
        name: of the file in it.
        needed: arrays that it must have.
        wanted: arrays that are taken where it has them.

    Raises:
        RunFileError: it is none of a run's files, or its arrays are no numbers or too large.
    """
    try:
        with open_file(run_dir, name, MAX_FILE_BYTES) as file, zipfile.ZipFile(file) as archive:
            if sum(info.file_size for info in archive.infolist()) > MAX_ARRAY_BYTES:
                raise ValueError(f"its arrays have more than {MAX_ARRAY_BYTES} bytes")
            file.seek(0)
            arrays = np.load(file, allow_pickle=False)
            names = [array for array in (*needed, *wanted) if array in arrays] if set(needed) <= set(arrays) else []
            return {array: arrays[array].astype(np.float64, casting="same_kind") for array in names}
    except RunFileError:
        raise
    # Of bytes at random it may be any error: zlib's, and those of Python's parser, which numpy reads headers with.
    except Exception as error:
        raise RunFileError(
            f"{run_dir / name}: found what cannot be drawn ({error}); expected the arrays that a run writes. Remove it."
        ) from error


def read_artifacts(
    run_dir: Path, suffix: str, max_files: int, read: Callable[[str], Any]
) -> tuple[list[Any], list[str]]:
    """Read the files artifacts/*<suffix> of a run folder.

    Args:
        run_dir: the folder.
        suffix: of the files.
        max_files: how many are looked at.
        read: returns what a file holds, None where that is nothing to be drawn.

    Returns:
        what was read, and a note for each file that could not be.
    """
    contents, notes = [], []
    try:
        names = list_files(run_dir, "artifacts", suffix, max_files)
    except RunFileError as error:
        return [], [str(error)]
    for name in names:
        try:
            contents.append(read(name))
        except (RunFileError, *UNREADABLE) as error:
            notes.append(f"{name} could not be drawn: {error}")
    return [content for content in contents if content is not None], notes
