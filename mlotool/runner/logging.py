"""Where logged numbers go: metrics.csv always, W&B and TensorBoard by choice."""

import csv
import logging
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from pytorch_lightning.loggers import Logger, TensorBoardLogger, WandbLogger

from mlotool.core.errors import ConfigError
from mlotool.core.files import cannot_write, replacing, writing
from mlotool.runner.folder import RunFolder, plain

if TYPE_CHECKING:
    from wandb.sdk.wandb_run import Run

SECONDS_BETWEEN_FLUSHES = 1.0
HEADER = ("tick", "key", "value")
HEADER_BYTES = len(",".join(HEADER)) + 1


class MetricLog:
    """Writes `tick,key,value` lines and passes the same numbers on to the loggers.

    Args:
        path: of metrics.csv; lines are appended.
        position: bytes of it to keep, where a run goes on from a checkpoint: what came after will come again.

    Attributes:
        last: the last value of each key.
        loggers: Lightning's, which get what is logged from now on.
    """

    def __init__(self, path: Path, position: int | None = None) -> None:
        self.last: dict[str, float] = {}
        self._path = path
        self.loggers: list[Logger] = []
        self._flushed_at = float("-inf")
        if position is not None:
            _cut(path, position)
        with writing(path):
            is_new = not path.exists() or path.stat().st_size == 0
            self._file: TextIO = path.open("a", newline="", encoding="utf-8")
        self._writer = csv.writer(self._file, lineterminator="\n")
        if is_new:
            self._writer.writerow(HEADER)

    def log(self, tick: int, values: Mapping[str, float]) -> None:
        """Log `values` at `tick`."""
        if not values:
            return
        self.last.update(values)
        # Nine digits give a float32 back exactly.
        with writing(self._path):
            self._writer.writerows((tick, key, f"{value:.9g}") for key, value in values.items())
        if time.monotonic() - self._flushed_at >= SECONDS_BETWEEN_FLUSHES:
            self.flush()
        for logger in list(self.loggers):
            try:
                logger.log_metrics(dict(values), step=tick)
            # W&B's service and TensorBoard's thread have errors of many kinds, and none is worth a training.
            except Exception as error:
                self.loggers.remove(logger)
                _warn_of_logger(type(logger).__name__, "no longer takes values", error)

    def flush(self) -> None:
        """Write what is still in memory, as is done every second."""
        with writing(self._path):
            self._file.flush()
        self._flushed_at = time.monotonic()

    def position(self) -> int:
        """Return the length in bytes, once all of it is on the disk."""
        self.flush()
        with writing(self._path):
            os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        """Close metrics.csv."""
        with writing(self._path):
            self._file.close()


class RunLogger(Logger):
    """The logger of a run's Trainer: what callbacks log goes where all numbers of the run go, at the run's tick.

    Args:
        log: takes the numbers.
        tick: returns the number of ticks done.
        folder: of the run.
    """

    def __init__(self, log: MetricLog, tick: Callable[[], int], folder: Path) -> None:
        self._log, self._tick, self._folder = log, tick, folder

    @property
    def name(self) -> str:
        """The run folder's name."""
        return self._folder.name

    @property
    def version(self) -> str:
        """There is one of each run."""
        return ""

    @property
    def save_dir(self) -> str:
        """The run folder."""
        return str(self._folder)

    @property
    def experiment(self) -> Any:
        """What the first of the run's loggers writes to (W&B's run, say); None without loggers."""
        return next((logger.experiment for logger in self._log.loggers), None)  # type: ignore[attr-defined]

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log values; the Trainer's own count of steps, which are chunks of ticks here, is left aside."""
        self._log.log(self._tick(), {key: float(value) for key, value in metrics.items()})

    def log_hyperparams(self, params: Any, *_: Any, **__: Any) -> None:
        """Leave them: config.yaml has them."""


def _cut(path: Path, position: int) -> None:
    """Keep the first bytes of a file, in a file of its own: what has another link keeps its content there."""
    size = path.stat().st_size if path.exists() else 0
    if size < position:
        warnings.warn(
            f"{path} has {size} bytes, while the checkpoint knows of {position}; expected the file that the run wrote. "
            "Lines before the checkpoint are missing from it: copy it from where the run was, or go on without.",
            stacklevel=3,
        )
    if path.exists():
        with replacing(path) as temporary:
            shutil.copyfile(path, temporary)
            os.truncate(temporary, min(size, position))


@contextmanager
def open_loggers(
    config: Any,
    folder: RunFolder,
    problems: Iterable[str],
    resumed_at: int | None = None,
    *,
    others: Sequence[Logger] = (),
    with_packages: bool = True,
) -> Iterator[list[Logger]]:
    """Open the loggers that the config asks for; finish them in any case, where an error is a warning.

    Args:
        config: the whole config; its `logger` node chooses.
        folder: of the run.
        problems: names of the problems: each gets an axis of its own in W&B, its steps.
        resumed_at: the tick that a run goes on from; None for a new one.
        others: Lightning's loggers that the config has built.
        with_packages: whether W&B keeps a list of all installed packages, which takes a tenth of a second: one list
            is enough for the runs of one process.
    """
    settings = config.logger
    loggers: list[Logger] = [*others]
    run: Run | None = None
    status = "failed"
    # Else Python prints a traceback for each line of W&B's debug.log that a full disk refuses.
    kept, logging.raiseExceptions = logging.raiseExceptions, False
    try:
        if settings.wandb and settings.mode != "disabled":
            run = _start_wandb(config, folder, problems, with_packages=with_packages)
            # Not WandbLogger(offline=True): it sets WANDB_MODE for the whole process.
            loggers.append(WandbLogger(experiment=run, save_dir=folder.path))
        if settings.tensorboard:
            loggers.append(_tensorboard_logger(folder.path, resumed_at))
        yield loggers
        status = "success"
    finally:
        ends = [(type(logger).__name__, partial(logger.finalize, status)) for logger in loggers]
        if run is not None:
            ends.append(("W&B", partial(run.finish, exit_code=int(status == "failed"))))
        for name, end in ends:
            try:
                end()
            # The run's own files are written by then.
            except Exception as error:
                _warn_of_logger(name, "could not finish its files", error)
        logging.raiseExceptions = kept


def _warn_of_logger(logger: str, what: str, error: Exception) -> None:
    reason = " ".join(str(error).split()) or type(error).__name__
    warnings.warn(
        f"{logger} {what} ({reason[:300].rstrip('.')}); expected a disk that takes its files, and a service that "
        "answers. The run does without it: its values stand in metrics.csv.",
        stacklevel=3,
    )


def _start_wandb(config: Any, folder: RunFolder, problems: Iterable[str], *, with_packages: bool) -> "Run":
    # Imported here: it takes a second, and runs without W&B need not have it.
    import wandb

    mode, run_dir = config.logger.mode, folder.path
    try:
        run = wandb.init(
            project=config.logger.project,
            name=f"{config.name}/{run_dir.name}",
            # The jobs of a sweep are one group.
            group=os.environ.get("WANDB_RUN_GROUP") or folder.sweep or config.name,
            dir=str(run_dir),
            mode=mode,
            **_same_wandb_run(run_dir, mode),
            config=plain(config),
            # A run that the user's own code has open is left alone.
            reinit="create_new",
            # Neither W&B's git, which runs what a repository's configuration names, nor the user's code in a run.
            settings=wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,
                disable_code=True,
                **({} if with_packages else {"x_save_requirements": False}),
            ),
        )
    except OSError as error:
        raise cannot_write(run_dir / "wandb", error) from error
    # Its own, pydantic's of its settings, those of the service that it starts: they have no common base.
    except Exception as error:
        raise ConfigError(
            f"logger.mode: found '{mode}', with which W&B does not start ({' '.join(str(error).split()).rstrip('.')}); "
            "expected WANDB_ variables that it takes and, if online, an account. Run `wandb login`, or set "
            "logger.mode=offline or disabled."
        ) from error
    run.define_metric("trainer/global_step")
    run.define_metric("*", step_metric="trainer/global_step", step_sync=True)
    for name in problems:
        run.define_metric(f"{name}/step")
        run.define_metric(f"{name}/*", step_metric=f"{name}/step")
    return run


def _same_wandb_run(run_dir: Path, mode: str) -> dict[str, Any]:
    """Return what makes W&B go on with the run that the folder holds, if it holds one.

    Offline, W&B cannot see what it has of a run, and warns of `resume`: the next part has the same id, and
    `wandb sync --append` joins them.
    """
    # run-<date>_<time>-<id>, offline-run-<date>_<time>-<id>
    folders = sorted((run_dir / "wandb").glob("*run-*-*"), key=lambda folder: folder.name.split("-")[-2])
    if not folders:
        return {}
    settings = {"id": folders[0].name.rpartition("-")[2]}
    return {**settings, "resume": "allow"} if mode == "online" else settings


def _tensorboard_logger(run_dir: Path, resumed_at: int | None) -> Logger:
    try:
        # What was logged after the checkpoint is hidden: it comes again.
        purge: dict[str, Any] = {} if resumed_at is None else {"purge_step": resumed_at + 1}
        return TensorBoardLogger(run_dir, name="tensorboard", version="", **purge)
    except ModuleNotFoundError as error:
        raise ConfigError(
            "logger.tensorboard: found true, but the package tensorboard is not installed; "
            "run `pip install mlotool[tensorboard]`, or set logger.tensorboard=false."
        ) from error
