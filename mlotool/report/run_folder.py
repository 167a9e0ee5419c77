"""What a run folder holds, read within limits, and so that no missing or broken file stops the report."""

import csv
import zipfile
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlotool.config.objective import is_wrong_way_round, objective_direction
from mlotool.config.run_config import read_run_config
from mlotool.core.errors import ConfigError, RunFileError
from mlotool.core.run_files import (
    MAX_METRICS_BYTES,
    MAX_TEXT_BYTES,
    list_files,
    open_file,
    read_json,
    read_text,
)
from mlotool.report.formats import LARGEST

MARKS = ("summary.json", "config.yaml", "metrics.csv", "provenance.json")
# What reading the content of a file raises that is not as a run writes it.
UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, OverflowError, MemoryError)


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
        objective = {"key": self.config.get("objective"), **as_dict(self.summary.get("objective"))}
        # What is known of the key counts before what a summary says: older runs could be told the wrong direction.
        key = objective["key"] or self.config.get("objective")
        mode = objective.get("mode") or self.config.get("objective_mode")
        return objective | {"mode": objective_direction({**self.config, "objective": key, "objective_mode": mode})}

    @property
    def wrong_way_note(self) -> str:
        """A note where the best checkpoint was chosen by the wrong direction, as older versions allowed."""
        if not is_wrong_way_round(self.config):
            return ""
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

    def part(name: str, read: Callable[[], Any]) -> Any:
        try:
            content = read()
        except ConfigError as error:
            run.notes.append(f"{name} could not be read: {error}")
            return None
        if content is None and name not in ("recipe.yaml", "overrides.txt"):
            run.notes.append(f"{name} is missing.")
        return content

    document = part("config.yaml", lambda: read_run_config(path))
    run.config_text, run.config = ("", {}) if document is None else (document.text, document.data)
    run.recipe_text = part("recipe.yaml", lambda: read_text(path, "recipe.yaml", MAX_TEXT_BYTES)) or ""
    words = part("overrides.txt", lambda: read_text(path, "overrides.txt", MAX_TEXT_BYTES)) or ""
    run.overrides = tuple(line.strip() for line in words.splitlines() if line.strip())
    run.summary = part("summary.json", lambda: read_json(path, "summary.json")) or {}
    run.provenance = part("provenance.json", lambda: read_json(path, "provenance.json")) or {}
    if run.wrong_way_note:
        run.notes.append(run.wrong_way_note)
    return run


def refuse_foreign(run: RunFolder) -> None:
    """Raise ConfigError where the folder is another program's, which has a config.yaml as well."""
    if run.config and "problems" not in run.config and not (run.path / "provenance.json").exists():
        raise ConfigError(
            f"'{run.path}' is not the folder of a run: its config.yaml has no problems, and there is no "
            "provenance.json. Give the folder that `mlotool run` printed, outputs/<name>/<date>_<time>."
        )


def as_dict(value: Any) -> dict[Any, Any]:
    """Return the value where it is a mapping, and else an empty one."""
    return value if isinstance(value, dict) else {}


def _listing(path: Path) -> str:
    names = sorted(entry.name for entry in path.iterdir())
    if not names:
        return "an empty folder"
    return "a folder with " + ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


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
    num_bad = num_others = 0
    for line in text.splitlines():
        try:
            tick, key, value = next(csv.reader([line]))[:3]
            if (tick, key, value) == ("tick", "key", "value"):
                continue
            place = float(tick)
            if key not in points and len(points) == MAX_KEYS:
                num_others += 1
            elif abs(place) < LARGEST_TICK:
                # A resumed run logs some ticks again: the later value counts.
                points.setdefault(key, {})[place] = float(value)
            else:
                num_bad += 1
        except (ValueError, StopIteration, csv.Error):
            num_bad += bool(line)
    notes = []
    if num_bad:
        notes.append(f"metrics.csv has {num_bad} line{'s' if num_bad > 1 else ''} that could not be read.")
    if num_others:
        notes.append(f"metrics.csv has more than {MAX_KEYS} keys; {num_others} values of later ones are left out.")
    if is_cut:
        notes.append(f"metrics.csv has more than {MAX_BYTES} bytes; what comes after those is left out.")
    return [_series(key, values) for key, values in points.items() if values], notes


def _series(key: str, points: dict[float, float]) -> Series:
    owner, slash, metric = key.partition("/")
    ticks, values = (np.array(list(numbers), dtype=np.float64) for numbers in (points, points.values()))
    order = np.argsort(ticks, kind="stable")
    values[~(np.abs(values) < LARGEST)] = np.nan
    return Series(owner if slash else "", metric if slash else key, ticks[order], values[order])


def problem_names(configured: Iterable[str], series: Iterable[Series], splits: Collection[str]) -> list[str]:
    """Return the problems of a run; without a config, the owners of metrics that are no usual split."""
    names = [str(name) for name in configured]
    return names or list(dict.fromkeys(each.owner for each in series if each.owner and each.owner not in splits))


# Of a .npz file, of its arrays that are read, unpacked (ten million samples), and of the list of its arrays.
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
            sizes = {info.filename.removesuffix(".npy"): info.file_size for info in archive.infolist()}
            if not set(needed) <= set(sizes):
                return {}
            names = [array for array in (*needed, *wanted) if array in sizes]
            if (total := sum(sizes[array] for array in names)) > MAX_ARRAY_BYTES:
                raise ValueError(f"its arrays have {total} bytes, and at most {MAX_ARRAY_BYTES} are read")
            file.seek(0)
            with np.load(file, allow_pickle=False) as arrays:
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
