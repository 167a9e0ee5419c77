"""The folder of a run: what it holds is named, written and read here alone."""

import json
import re
import shutil
import zipfile
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from mlotool.core.errors import ConfigError, MlotoolError, RunFileError
from mlotool.folders import safe_files
from mlotool.folders.documents import Document, parse_document
from mlotool.folders.files import is_held, lock, replacing, write_text, writing
from mlotool.folders.metrics_file import HEADER, MetricsFile, read_points

if TYPE_CHECKING:
    from numpy.typing import NDArray

EXPECTED = "the folder of a run, outputs/<name>/<date>_<time>. Give the folder that `mlotool run` printed."

# How a run ends whose decisions make no model: it is not trained.
INFEASIBLE = "infeasible"
# How a run has ended that goes on with `resume`, as a job does when its sweep does.
INTERRUPTED = "interrupted"
ENDED = ("finished", "pruned", "failed", INFEASIBLE)
STATUSES = (*ENDED, INTERRUPTED)

_STAMP = "%Y-%m-%d_%H-%M-%S"
_EMPTY_SUMMARY: dict[str, Any] = {"objective": None, "metrics": {}, "best": None}

# Of metrics.csv, so that a page is there in seconds; three million usual lines have as many bytes.
MAX_METRICS_BYTES, MAX_KEYS = 100_000_000, 1_000
# Of a .npz file, packed and unpacked: ten million samples.
MAX_NPZ_BYTES, MAX_ARRAY_BYTES = 200_000_000, 400_000_000


class Folder:
    """A folder of ours, which may be a stranger's: no link in it is followed that leads out of it.

    Args:
        path: the folder; it need not be there yet.

    Raises:
        RunFileError: a file is none of ours; from all methods that read.
        WriteError: the disk does not take a file; from all that write.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def has(self, name: str) -> bool:
        """Say whether there is a file or folder of that name."""
        return (self.path / name).exists()

    def text(self, name: str | Path, max_bytes: int = safe_files.MAX_TEXT_BYTES) -> str | None:
        """Return a text file as it stands; None where there is none."""
        return safe_files.read_text(self.path, name, max_bytes)

    def json(self, name: str, max_bytes: int = safe_files.MAX_JSON_BYTES) -> dict[str, Any] | None:
        """Return the mapping that a JSON file holds; None where there is none."""
        return safe_files.read_json(self.path, name, max_bytes)

    def write_text(self, name: str, text: str) -> None:
        """Write a text file whole or not at all."""
        write_text(self.path / name, text)

    def write_json(self, name: str, content: Mapping[str, Any], indent: int | None = 2) -> None:
        """Write a JSON file whole or not at all."""
        self.write_text(name, json.dumps(content, indent=indent) + "\n")


class RunFolder(Folder):
    """The folder of a run. What reads gives nothing for a file that is not there: None, or an empty mapping or list.

    Example:
        >>> RunFolder(Path("no-such-run")).summary()
        {}
    """

    # Every setting, with all references resolved; who makes this file has the folder.
    CONFIG = "config.yaml"
    # The words of the command line, the recipe's own file, and the graph of the problems as mermaid draws it.
    OVERRIDES, RECIPE, GRAPH = "overrides.txt", "recipe.yaml", "graph.mmd"
    # By what command, on what and when the run was made: the last of what is written before the first tick.
    PROVENANCE = "provenance.json"
    # Numbers by tick; and how the run ended, which one that goes on has not.
    METRICS, SUMMARY = "metrics.csv", "summary.json"
    # The models that were chosen from spaces, and how often each candidate of a shared space was trained.
    NODES, PATHS = "nodes.json", "paths.json"
    ARTIFACTS, CHECKPOINTS = "artifacts", "checkpoints"
    # The newest checkpoint; and the folder for those of callbacks, which nobody resumes from.
    LAST, OF_CALLBACKS = "last.ckpt", "checkpoints/callbacks"
    # Of the job of a sweep: what its process is to run, and what it prints.
    JOB, LOG = "job.json", "log.txt"
    # Of a member of `sweep=pbt`: whom it has copied, and by which settings its state was trained.
    LINEAGE = "lineage.json"
    PAGE, FIGURES = "report.html", "report"
    # A folder with one of them is a run's.
    MARKS = (SUMMARY, METRICS, PROVENANCE)

    @classmethod
    def of(cls, path: Path) -> "RunFolder":
        """Return the run folder that a path names: itself, or that of a checkpoint."""
        is_checkpoint = path.is_file() and path.suffix == ".ckpt" and path.parent.name == cls.CHECKPOINTS
        return cls(path.parent.parent if is_checkpoint else path)

    @classmethod
    def create(cls, name: str, path: Path | None) -> "RunFolder":
        """Make a folder that no other run has.

        Args:
            name: of the recipe.
            path: of the folder; None takes `outputs/<name>/<date>_<time>`. Where it is made from the time and another
                run of the same second has it, the later one gets `<date>_<time>_1`.

        Raises:
            ConfigError: `path` holds a run, and is none that was made from the time.
        """
        path = Path("outputs", name, datetime.now().strftime(_STAMP)) if path is None else Path(path)
        # Hydra has made the folder of a run of the command line before we are asked; a job's lies in the sweep's. A
        # name that the user has chosen is not changed.
        is_stamped = is_stamp(path.name) or is_stamp(path.parent.name)
        others = (path.with_name(f"{path.name}_{count}") for count in range(1, 1_000_000) if is_stamped)
        with writing(path):
            folder = next((place for place in map(cls, chain((path,), others)) if place._claim()), None)
        if folder is None:
            raise ConfigError(
                f"{path} holds a run already; expected a new or empty folder. Name another one, or remove it."
            )
        try:
            safe_files.check_tree(folder.path)
            folder.make_folders()
        except MlotoolError as error:
            # So that the same command can take the folder once it is put right.
            (folder.path / cls.CONFIG).unlink(missing_ok=True)
            if isinstance(error, RunFileError):
                raise ConfigError(
                    f"{folder.path}: found files of other programs ({error}). Name a new folder."
                ) from error
            raise
        return folder

    def _claim(self) -> bool:
        """Take it for one run, by making its config.yaml, which only one process can; False where it is taken."""
        self.path.mkdir(parents=True, exist_ok=True)
        if self.has(self.METRICS):
            return False
        try:
            (self.path / self.CONFIG).open("x").close()
        except FileExistsError:
            return False
        return True

    def free_if_never_begun(self) -> None:
        """Give a folder back whose run was killed when it had taken it and not yet written a word."""
        config = self.path / self.CONFIG
        if config.is_file():
            with self.lock() as is_free:
                if is_free and config.stat().st_size == 0:
                    config.unlink()

    def make_folders(self) -> None:
        """Make the folders in it that are missing."""
        for folder in (self.artifacts, self.checkpoints):
            with writing(folder):
                folder.mkdir(exist_ok=True)

    def lock(self, patience_s: float = 0.0) -> AbstractContextManager[bool]:
        """Hold the folder, as `files.lock` does."""
        return lock(self.path, patience_s)

    @property
    def is_locked(self) -> bool:
        """Whether a process holds it."""
        return is_held(self.path)

    # What is there.

    @property
    def is_run(self) -> bool:
        """Whether it holds one of the files that every run writes."""
        return self.path.is_dir() and any((self.path / name).is_file() for name in self.MARKS)

    def check(self) -> None:
        """Raise ConfigError where it is no run's folder."""
        if not self.is_run:
            found = "another folder" if self.path.is_dir() else "a file" if self.path.exists() else "no such folder"
            raise ConfigError(
                f"'{self.path}' is not the folder of a run: found {found}; expected a folder with one of "
                f"{', '.join(self.MARKS)}. Give the folder that `mlotool run` printed, outputs/<name>/<date>_<time>."
            )

    @property
    def has_inputs(self) -> bool:
        """Whether all is written that is known before the first tick."""
        return self.has(self.PROVENANCE)

    @property
    def has_values(self) -> bool:
        """Whether metrics.csv has more than its header."""
        metrics = self.path / self.METRICS
        return metrics.is_file() and metrics.stat().st_size > len(",".join(HEADER)) + 1

    @property
    def artifacts(self) -> Path:
        """The folder of arrays for the report."""
        return self.path / self.ARTIFACTS

    @property
    def checkpoints(self) -> Path:
        """The folder of best.ckpt, last.ckpt and those before."""
        return self.path / self.CHECKPOINTS

    def checkpoint(self, which: str) -> Path:
        """Return where the checkpoint `which` ("best" or "last") lies."""
        return self.checkpoints / f"{which}.ckpt"

    def kept(self) -> Path | None:
        """Return the checkpoint that a finished run is judged by: the best one, else the last one."""
        return next((path for path in map(self.checkpoint, ("best", "last")) if path.is_file()), None)

    # What is read.

    def config(self) -> Document | None:
        """Return the text and the values of config.yaml.

        Raises:
            ConfigError: it is larger, deeper or stranger than a config.
        """
        text = self.text(self.CONFIG, safe_files.MAX_CONFIG_BYTES)
        return None if text is None else parse_document(self.path / self.CONFIG, text)

    def overrides(self) -> list[str]:
        """Return the overrides of the command line; not its `--trust=..`, which stand in the file as well."""
        lines = [line.strip() for line in (self.text(self.OVERRIDES) or "").splitlines()]
        return [line for line in lines if line and not line.startswith("--")]

    def summary(self) -> dict[str, Any]:
        """Return status, objective, metrics, best and error of the run."""
        return self.json(self.SUMMARY) or {}

    def provenance(self) -> dict[str, Any]:
        """Return command, git, versions, platform, device, seed and times."""
        return self.json(self.PROVENANCE) or {}

    def metrics(self) -> tuple[dict[str, dict[float, float]], list[str]]:
        """Return the logged values by key and tick, in order of appearance, and notes on what could not be read."""
        try:
            with safe_files.open_file(self.path, self.METRICS, safe_files.MAX_METRICS_BYTES) as file:
                content, is_cut = file.read(MAX_METRICS_BYTES), bool(file.read(1))
        except FileNotFoundError:
            return {}, []
        points, num_bad = read_points(content.decode("utf-8", errors="replace").splitlines(), MAX_KEYS)
        notes = [f"{self.METRICS} has {num_bad} line{'s' * (num_bad > 1)} that could not be read."] if num_bad else []
        if is_cut:
            notes.append(f"{self.METRICS} has more than {MAX_METRICS_BYTES} bytes; what comes after those is left out.")
        return points, notes

    def artifact_names(self, suffix: str, max_files: int) -> list[str]:
        """Return the names of the files `artifacts/*<suffix>`, relative to the folder; at most `max_files`."""
        return safe_files.list_files(self.path, self.ARTIFACTS, suffix, max_files)

    def arrays(self, name: str, needed: Collection[str], wanted: Collection[str]) -> "dict[str, NDArray[Any]]":
        """Return some arrays of a .npz file; none where it lacks one that is needed. Nothing in it is executed.

        Args:
            name: of the file.
            needed: arrays that it must have.
            wanted: arrays that are taken where it has them.
        """
        # Imported here: who reads a config needs none.
        import numpy as np

        try:
            with safe_files.open_file(self.path, name, MAX_NPZ_BYTES) as file, zipfile.ZipFile(file) as archive:
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
                f"{self.path / name}: found arrays that cannot be drawn ({error}); expected those that a run writes. "
                "Remove it."
            ) from error

    # What is written.

    def write_config(self, values: Mapping[str, Any]) -> None:
        """Write config.yaml."""
        self.write_text(self.CONFIG, yaml.safe_dump(values, sort_keys=False, allow_unicode=True))

    def write_overrides(self, words: Sequence[str]) -> None:
        """Write the words of the command line."""
        self.write_text(self.OVERRIDES, "".join(f"{word}\n" for word in words))

    def copy_recipe(self, path: Path) -> None:
        """Keep the recipe's own file."""
        with writing(self.path / self.RECIPE):
            shutil.copyfile(path, self.path / self.RECIPE)

    def open_metrics(self, position: int | None = None) -> MetricsFile:
        """Return metrics.csv to append to; with `position`, once all after that many bytes is cut off."""
        return MetricsFile(self.path / self.METRICS, position)

    def write_arrays(self, name: str, arrays: "Mapping[str, NDArray[Any]]") -> None:
        """Write `artifacts/<name>.npz`."""
        import numpy as np

        with replacing(self.artifacts / f"{name}.npz") as temporary, temporary.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json; NaN and infinity become null, which JSON has and they are not."""
        self.write_json(self.SUMMARY, json.loads(json.dumps(summary), parse_constant=lambda name: None))

    def write_failure(self, error: str, status: str = "failed") -> None:
        """Write into summary.json why the run failed; what stands there of its numbers stays."""
        self.write_summary({**_EMPTY_SUMMARY, **self.summary(), "status": status, "error": error})

    def forget_end(self, *, with_metrics: bool) -> None:
        """Make ready for a run that goes on here: its end is forgotten, and its numbers where it begins again."""
        for name in (self.SUMMARY, *[self.METRICS] * with_metrics):
            (self.path / name).unlink(missing_ok=True)
        self.make_folders()

    def write_page(self, text: str) -> Path:
        """Write report.html, and return where it lies."""
        return safe_files.write_text(self.path, self.PAGE, text)


def is_stamp(name: str) -> bool:
    """Say whether a folder's name is one that was made from the time, with a number behind it or not."""
    return re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d(_\d+)*", name) is not None
