"""The run folder: where each file of a run lies, how it is claimed, and what is written and read once."""

import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from mlotool.config import Built, Origin, finish_provenance, load_run_config, write_provenance
from mlotool.config.run_config import read_summary
from mlotool.core.errors import ConfigError, MlotoolError, RunFileError
from mlotool.core.files import write_text, writing
from mlotool.core.run_files import check_tree
from mlotool.runner.checkpoint import FOLDER, newest_first, read_checkpoint
from mlotool.runner.records import write_nodes

PATIENCE_S = 8.0
"""A killed run's data loaders need some seconds to notice, and hold what it held."""

STAMP = "%Y-%m-%d_%H-%M-%S"


@contextmanager
def run_lock(folder: Path, patience_s: float = 0.0) -> Iterator[bool]:
    """Hold a folder, and yield whether it could be had; the system gives it back however the process ends.

    Args:
        folder: the run folder.
        patience_s: how long to wait for it.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield True
        return
    descriptor = os.open(folder, os.O_RDONLY)
    give_up_at = time.monotonic() + patience_s
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= give_up_at:
                    yield False
                    return
                time.sleep(0.1)
                continue
            except OSError:  # a file system without locks
                pass
            yield True
            return
    finally:
        os.close(descriptor)


class RunFolder:
    """The files of a run.

    Args:
        path: the folder.
        sweep: name of the sweep's folder, where the run is a job of one.

    Attributes:
        config: the config, with everything resolved; whoever makes it has the folder.
        metrics: `tick,key,value`.
        summary: how the run ended; a run that goes on has none.
        artifacts: the folder of arrays for the report.
        checkpoints: the folder of `best.ckpt` and `last.ckpt`.
    """

    def __init__(self, path: Path, sweep: str | None = None) -> None:
        self.path, self.sweep = path, sweep
        self.config, self.metrics, self.summary = (
            path / name for name in ("config.yaml", "metrics.csv", "summary.json")
        )
        self.artifacts, self.checkpoints = path / "artifacts", path / FOLDER

    @property
    def has_inputs(self) -> bool:
        """Whether all is written that is known before the first tick: provenance.json is the last of it."""
        return (self.path / "provenance.json").exists()

    @classmethod
    def create(cls, config: Any, output_dir: Path | None, sweep: str | None = None) -> "RunFolder":
        """Make the folder, which no other run has: `output_dir`, or a new `outputs/<name>/<date>_<time>`.

        Where two runs of the same second have the same `<date>_<time>`, the later one gets `<date>_<time>_1`.

        Raises:
            ConfigError: `output_dir` holds a run, and its name is none that was made from the time.
        """
        stamped = Path("outputs") / config.name / datetime.now().strftime(STAMP)
        path = stamped if output_dir is None else Path(output_dir)
        # Hydra has made the folder of a run of the command line before we are asked; a job's lies in the sweep's. A
        # name that the user has chosen is not changed.
        is_stamped = any(is_stamp(folder.name) for folder in (path, path.parent))
        others = (path.with_name(f"{path.name}_{count}") for count in range(1, 1_000_000) if is_stamped)
        with writing(path):
            folder = next((cls(place, sweep) for place in chain((path,), others) if _claim(place)), None)
        if folder is None:
            raise ConfigError(
                f"{path} holds a run already; expected a new or empty folder. Name another one, or remove it."
            )
        try:
            check_tree(folder.path)
            folder.make_folders()
        except MlotoolError as error:
            # So that the same command can take the folder once it is put right.
            folder.config.unlink(missing_ok=True)
            if isinstance(error, RunFileError):
                raise ConfigError(
                    f"{folder.path}: found files of other programs ({error}). Name a new folder."
                ) from error
            raise
        return folder

    def make_folders(self) -> None:
        """Make the folders in it that are missing."""
        for folder in (self.artifacts, self.checkpoints):
            with writing(folder):
                folder.mkdir(exist_ok=True)

    def checkpoint(self, which: str) -> Path:
        """Return where the checkpoint `which` ("best" or "last") lies."""
        return self.checkpoints / f"{which}.ckpt"

    def find_checkpoint(self, which: str) -> Path:
        """Return the checkpoint `which`; a run without one is a ConfigError."""
        if not self.path.is_dir():
            raise ConfigError(
                f"There is no folder '{self.path}'; expected that of a run, outputs/<name>/<date>_<time>. "
                "Give the folder that `mlotool run` printed."
            )
        path = self.checkpoint(which)
        if not path.is_file():
            # Refuses a folder that is not a run's.
            load_run_config(self.path, is_own=True)
            present = ", ".join(one.stem for one in newest_first(self.checkpoints)) or "none"
            raise ConfigError(
                f"{self.path} has no checkpoint '{which}', but {present}; expected {path}. Name another one "
                "(--checkpoint last), or run the recipe with runner.checkpoint=true until its first tick."
            )
        return path

    def kept(self) -> Path | None:
        """Return the checkpoint that a finished run is judged by: the best one, else the last one."""
        return next((path for path in map(self.checkpoint, ("best", "last")) if path.is_file()), None)

    def what_is_kept(self) -> str:
        """Return in a sentence what a run that failed can go on from."""
        last = self.checkpoint("last")
        if not last.is_file():
            return "No checkpoint is kept, for runner.checkpoint=false."
        tick = read_checkpoint(last)["tick"]
        state = f"after tick {tick}" if tick else "the initial one"
        return f"{last} holds the last good state that was saved, {state}."

    def write_inputs(self, config: Any, origin: Origin, built: Built) -> None:
        """Write everything that is known before the first tick."""
        write_nodes(self.path, built)
        self._write_config(config)
        # Of a run that looked for one to go on with, and found none.
        overrides = [f"{word}\n" for word in origin.overrides if not word.startswith("resume=")]
        write_text(self.path / "overrides.txt", "".join(overrides))
        write_text(self.path / "graph.mmd", built.program.graph.mermaid())
        if origin.recipe_path is not None:
            with writing(self.path / "recipe.yaml"):
                shutil.copyfile(origin.recipe_path, self.path / "recipe.yaml")
        write_provenance(self.path, config, origin)

    def reopen(self, config: Any, *, begins_again: bool) -> None:
        """Make ready for a run that goes on here, maybe with more ticks; the end that it had is forgotten.

        Args:
            config: of the run.
            begins_again: whether it has no checkpoint to go on from.
        """
        self.summary.unlink(missing_ok=True)
        if begins_again:
            self.metrics.unlink(missing_ok=True)
        self._write_config(config)
        self.make_folders()

    def _write_config(self, config: Any) -> None:
        values = plain(config)
        values |= {"resume": None} if "resume" in values else {}
        write_text(self.config, yaml.safe_dump(values, sort_keys=False, allow_unicode=True))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json; NaN and infinity become null, which JSON has and they are not."""
        plain_summary = json.loads(json.dumps(summary), parse_constant=lambda name: None)
        write_text(self.summary, json.dumps(plain_summary, indent=2) + "\n")

    def read_summary(self) -> dict[str, Any]:
        """Return summary.json; empty where there is none."""
        return read_summary(self.path)

    def note_failure(self, text: str) -> None:
        """Write the cause of a failure into summary.json, where the run has written a consequence, or nothing."""
        summary = self.read_summary()
        if not summary:
            finish_provenance(self.path)
            summary = {"objective": None, "metrics": {}, "best": None, "num_ticks": 0, "training_s": 0.0}
        self.write_summary({**summary, "status": "failed", "error": text})


def is_stamp(name: str) -> bool:
    """Say whether a folder's name is one that was made from the time, with a number behind it or not."""
    return re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d(_\d+)*", name) is not None


def _claim(path: Path) -> bool:
    """Take a folder for one run, by making its config.yaml, which only one process can; False where it is taken."""
    folder = RunFolder(path)
    path.mkdir(parents=True, exist_ok=True)
    if folder.metrics.exists():
        return False
    try:
        folder.config.open("x").close()
    except FileExistsError:
        return False
    return True


def plain(config: Any) -> Any:
    """Return a config as dicts, lists and scalars, with every interpolation resolved."""
    return OmegaConf.to_container(OmegaConf.create(config), resolve=True)
