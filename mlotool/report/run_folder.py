"""What a run folder holds, read within limits, and so that no missing or broken file stops the report."""

import csv
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from io import TextIOWrapper
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


SPLIT_NAMES = ("train", "meta", "val", "valid", "validation", "test")
# Of metrics.csv, so that a page is there in seconds; three million usual lines have as many characters.
MAX_LINES, MAX_KEYS, MAX_LINE_LENGTH, MAX_CHARACTERS = 2_000_000, 1_000, 2_000, 100_000_000

LARGEST_TICK = 1e15


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
    points: dict[str, dict[float, float]] = {}
    num_bad = num_lines = num_others = 0
    lines = _Lines()
    try:
        with (
            open_file(run_dir, "metrics.csv", MAX_METRICS_BYTES) as file,
            TextIOWrapper(file, encoding="utf-8", errors="replace", newline="") as text,
        ):
            for num_lines, row in enumerate(lines.rows(text), 1):
                if num_lines > MAX_LINES:
                    break
                if row[:3] == ["tick", "key", "value"] or not row:
                    continue
                try:
                    tick, key, value = float(row[0]), row[1], float(row[2])
                except (ValueError, IndexError):
                    tick, key, value = float("nan"), "", 0.0
                if not abs(tick) < LARGEST_TICK:
                    num_bad += 1
                elif len(points) == MAX_KEYS and key not in points:
                    num_others += 1
                else:
                    # A resumed run logs some ticks again: the later value counts.
                    points.setdefault(key, {})[tick] = value
    except FileNotFoundError:
        return [], []
    except RunFileError as error:
        return [], [str(error)]
    notes = []
    if num_bad:
        notes.append(f"metrics.csv has {num_bad} line{'s' if num_bad > 1 else ''} that could not be read.")
    if num_others:
        notes.append(f"metrics.csv has more than {MAX_KEYS} keys; {num_others} values of later ones are left out.")
    if num_lines > MAX_LINES or lines.num_characters > MAX_CHARACTERS:
        limit = f"{MAX_LINES} lines" if num_lines > MAX_LINES else f"{MAX_CHARACTERS} characters"
        notes.append(f"metrics.csv has more than {limit}; what comes after those is left out.")
    return [_series(key, values) for key, values in points.items()], notes


class _Lines:
    """The lines of a table, as far as they are read; a long line, which no run writes, comes in pieces."""

    def __init__(self) -> None:
        self.num_characters = 0

    def rows(self, text: TextIOWrapper) -> Iterator[list[str]]:
        """Yield the cells of each line."""
        rows = csv.reader(self._pieces(text))
        while True:
            try:
                yield next(rows)
            except StopIteration:
                return
            except csv.Error:
                yield ["unreadable"]

    def _pieces(self, text: TextIOWrapper) -> Iterator[str]:
        while (line := text.readline(MAX_LINE_LENGTH)) and self.num_characters <= MAX_CHARACTERS:
            self.num_characters += len(line)
            yield line


def _series(key: str, points: dict[float, float]) -> Series:
    owner, slash, metric = key.partition("/")
    ticks, values = (np.array(list(each), dtype=np.float64) for each in (points, points.values()))
    order = np.argsort(ticks, kind="stable")
    values[~(np.abs(values) < LARGEST)] = np.nan
    return Series(owner if slash else "", metric if slash else key, ticks[order], values[order])


def problem_names(configured: Iterable[str], series: Iterable[Series], splits: Collection[str]) -> list[str]:
    """Return the problems of a run; without a config, the owners of metrics that are no usual split."""
    names = [str(name) for name in configured]
    return names or list(dict.fromkeys(each.owner for each in series if each.owner and each.owner not in splits))


# Of a .npz file, of its arrays that are read, unpacked (ten million samples), and of the list of its arrays.
MAX_FILE_BYTES, MAX_ARRAY_BYTES = 200_000_000, 400_000_000

_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


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
            names = [each for each in (*needed, *wanted) if each in sizes]
            total = sum(sizes[each] for each in names)
            if total > MAX_ARRAY_BYTES:
                raise ValueError(f"its arrays have {total} bytes, and at most {MAX_ARRAY_BYTES} are read")
            return {each: _read_array(archive, each) for each in names}
    except RunFileError:
        raise
    # Of bytes at random it may be any error: zlib's, and those of Python's parser, which numpy reads headers with.
    except Exception as error:
        raise RunFileError(
            f"{run_dir / name}: found what cannot be drawn ({error}); expected the arrays that a run writes. Remove it."
        ) from error


def _read_array(archive: zipfile.ZipFile, name: str) -> NDArray[Any]:
    info = archive.getinfo(f"{name}.npy")
    with archive.open(info) as member:
        shape, _, dtype = _HEADERS[np.lib.format.read_magic(member)](member)
        # Before numpy makes room for what the header claims.
        num = int(np.prod([int(each) for each in shape], dtype=object))
        if dtype.kind not in "biuf" or num < 0 or num * dtype.itemsize > info.file_size:
            raise ValueError(f"'{name}' claims {num} values of type {str(dtype)[:40]} in {info.file_size} bytes")
    with archive.open(info) as member:
        array: NDArray[Any] = np.lib.format.read_array(member, allow_pickle=False)
    return array


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
    found, notes = [], []
    try:
        names = list_files(run_dir, "artifacts", suffix, max_files)
    except RunFileError as error:
        return [], [str(error)]
    for name in names:
        try:
            found.append(read(name))
        except (RunFileError, *UNREADABLE) as error:
            notes.append(f"{name} could not be drawn: {error}")
    return [each for each in found if each is not None], notes
