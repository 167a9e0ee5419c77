"""Where logged numbers go: metrics.csv always, the screen, W&B, TensorBoard and other loggers by choice."""

import logging
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers import Logger, TensorBoardLogger, WandbLogger
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from mlotool.config.composition import plain
from mlotool.config.schema import wandb_mode
from mlotool.core.errors import ConfigError
from mlotool.folders.files import cannot_write
from mlotool.folders.metrics_file import MetricsFile
from mlotool.folders.run_folder import RunFolder
from mlotool.folders.sweep_folder import SweepFolder

SECONDS_BETWEEN_REFRESHES, SECONDS_BETWEEN_LINES = 0.25, 2.0
# What `ticks/s` looks back at: a warm-up, or a compilation, is forgotten after it.
SECONDS_OF_RATE = 5.0


class MetricLog(Logger):
    """Writes `tick,key,value` lines and passes the same numbers on to the loggers.

    It is the logger of the run's Trainer, so that what callbacks log goes where all numbers of the run go.

    Args:
        folder: of the run.
        file: its metrics.csv; None on all ranks but the first.
        tick: returns the number of ticks done, at which a callback logs.

    Attributes:
        last: the last value of each key.
        ticks: the tick of that value.
        loggers: Lightning's, which get what is logged from now on.
    """

    def __init__(self, folder: Path, file: MetricsFile | None, tick: Callable[[], int] = lambda: 0) -> None:
        super().__init__()
        self.last: dict[str, float] = {}
        self.ticks: dict[str, int] = {}
        self.loggers: list[Logger] = []
        self._folder, self._file, self._tick = folder, file, tick

    def log(self, tick: int, values: Mapping[str, float]) -> None:
        """Log `values` at `tick`."""
        if not values:
            return
        self.last.update(values)
        self.ticks.update(dict.fromkeys(values, tick))
        if self._file is not None:
            self._file.append(tick, values)
        for logger in list(self.loggers):
            try:
                logger.log_metrics(dict(values), step=tick)
            # W&B's service and TensorBoard's thread have errors of many kinds, and none is worth a training.
            except Exception as error:
                self.loggers.remove(logger)
                _warn_of_logger(type(logger).__name__, "no longer takes values", error)

    def position(self) -> int:
        """Return the length of metrics.csv in bytes, once all of it is on the disk; 0 where there is no file."""
        return 0 if self._file is None else self._file.position()

    def close(self) -> None:
        """Close metrics.csv."""
        if self._file is not None:
            self._file.close()

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
        return next((logger.experiment for logger in self.loggers), None)  # type: ignore[attr-defined]

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log values; the Trainer's own count of steps, which are chunks of ticks here, is left aside."""
        self.log(self._tick(), {key: float(value) for key, value in metrics.items()})

    def log_hyperparams(self, params: Any, *_: Any, **__: Any) -> None:
        """Leave them: the loggers have the config."""

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Tell the loggers of a checkpoint of a ModelCheckpoint, which some of them upload."""
        for logger in self.loggers:
            logger.after_save_checkpoint(checkpoint_callback)


@contextmanager
def open_loggers(
    config: Any,
    folder: RunFolder,
    problems: Iterable[str],
    resumed_at: int | None = None,
    others: Sequence[Logger] = (),
) -> Iterator[list[Logger]]:
    """Open the loggers that the config asks for; finish them in any case, where an error is a warning.

    Args:
        config: the whole config; its `logger` node chooses.
        folder: of the run.
        problems: names of the problems: each gets an axis of its own in W&B, its steps.
        resumed_at: the tick that a run goes on from; None for a new one.
        others: Lightning's loggers that the config has built.
    """
    settings, loggers, status = config.logger, [*others], "failed"
    # Else Python prints a traceback for each line of W&B's debug.log that a full disk refuses.
    kept, logging.raiseExceptions = logging.raiseExceptions, False
    ends: list[Callable[[], object]] = []
    try:
        mode = wandb_mode(settings.mode, settings.wandb)
        if mode is not None:
            run = _start_wandb(config, folder, problems, mode)
            ends.append(lambda: run.finish(exit_code=int(status == "failed")))
            # Not WandbLogger(offline=True): it sets WANDB_MODE for the whole process.
            loggers.append(WandbLogger(experiment=run, save_dir=folder.path))
        for logger in others:
            try:
                logger.log_hyperparams(plain(config))
            except Exception as error:
                _warn_of_logger(type(logger).__name__, "does not take the config", error)
        if settings.tensorboard:
            loggers.append(_tensorboard_logger(folder.path, resumed_at))
        yield loggers
        status = "success"
    finally:
        ends = [*(partial(logger.finalize, status) for logger in loggers), *ends]
        for end in ends:
            try:
                end()
            # The run's own files are written by then.
            except Exception as error:
                _warn_of_logger("A logger", "could not finish its files", error)
        logging.raiseExceptions = kept


def _warn_of_logger(logger: str, what: str, error: Exception) -> None:
    reason = " ".join(str(error).split()) or type(error).__name__
    warnings.warn(
        f"{logger} {what} ({reason[:300].rstrip('.')}); expected a writable disk and a service that answers. The run "
        "continues without this logger: its values are in metrics.csv.",
        stacklevel=3,
    )


def _start_wandb(config: Any, folder: RunFolder, problems: Iterable[str], mode: Any) -> Any:
    # Imported here: it takes a second, and runs without W&B need not have it.
    import wandb

    run_dir, sweep = folder.path, SweepFolder(folder.path.absolute().parent)
    try:
        run = wandb.init(
            project=config.logger.project,
            name=f"{config.name}/{run_dir.name}{', control' if config.get('baseline') == 'fixed' else ''}",
            # The jobs of a sweep are one group.
            group=os.environ.get("WANDB_RUN_GROUP") or (sweep.path.name if sweep.is_sweep else config.name),
            dir=str(run_dir),
            mode=mode,
            **_same_wandb_run(run_dir, mode),
            config=plain(config),
            # A run that the user's own code has open is left alone.
            reinit="create_new",
            # Neither W&B's git, which runs what a repository's configuration names, nor the user's code in a run.
            settings=wandb.Settings(silent=True, console="off", disable_git=True, disable_code=True),
        )
    except OSError as error:
        raise cannot_write(run_dir / "wandb", error) from error
    # Its own, pydantic's of its settings, those of the service that it starts: they have no common base.
    except Exception as error:
        raise ConfigError(
            f"logger.mode: found '{mode}', with which W&B does not start ({' '.join(str(error).split()).rstrip('.')}). "
            "Look at its WANDB_ variables, run `wandb login`, or set logger.mode=offline or disabled."
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
    names = sorted((path.name for path in (run_dir / "wandb").glob("*run-*-*")), key=lambda name: name.split("-")[-2])
    if not names:
        return {}
    return {"id": names[0].rpartition("-")[2], **({"resume": "allow"} if mode == "online" else {})}


def _tensorboard_logger(run_dir: Path, resumed_at: int | None) -> Logger:
    # What was logged after the checkpoint is hidden: it comes again.
    purge: dict[str, Any] = {} if resumed_at is None else {"purge_step": resumed_at + 1}
    try:
        return TensorBoardLogger(run_dir, name="tensorboard", version="", **purge)
    except ModuleNotFoundError as error:
        raise ConfigError(
            "logger.tensorboard: found true; run `pip install mlotool[tensorboard]`, or set it to false."
        ) from error


class ProgressDisplay:
    """The ticks and the last values of a run; refreshed at flushes.

    On a terminal it is a live display; elsewhere (a log file, a cluster's output) a line now and then, at evaluations.

    Not Lightning's: its bar would show chunks of a round, and no problems.

    Args:
        problems: names of the problems.
        max_ticks: ticks of the run.
        enabled: False shows nothing.
        console: where it is shown.
    """

    def __init__(
        self, problems: Iterable[str], max_ticks: int, *, enabled: bool = True, console: Console | None = None
    ) -> None:
        self._problems = list(problems)
        self._max_ticks = max_ticks
        self._enabled = enabled
        self._console = console or Console(stderr=True)
        self._live = Live(console=self._console, auto_refresh=False)
        self._shown_at = float("-inf")
        # A time and the tick then: where the rate begins, and where its next one will.
        self._began = self._seen = time.monotonic(), 0

    def start(self, tick: int) -> None:
        """Begin to show progress, from `tick` on."""
        self._began = self._seen = time.monotonic(), tick
        if self._enabled and self._console.is_terminal:
            self._live.start()

    def update(self, tick: int, values: Mapping[str, float], *, is_last: bool = False) -> None:
        """Show the last logged values; it costs a millisecond, so not more often than four times a second."""
        rate, now = self._rate(tick)
        if self._live.is_started and (is_last or now - self._shown_at >= SECONDS_BETWEEN_REFRESHES):
            self._shown_at = now
            self._live.update(self._table(tick, rate, values), refresh=True)

    def note(self, tick: int, values: Mapping[str, float]) -> None:
        """Tell of an evaluation, where there is no live display."""
        rate, now = self._rate(tick)
        is_due = tick == self._max_ticks or now - self._shown_at >= SECONDS_BETWEEN_LINES
        if self._enabled and not self._live.is_started and is_due:
            self._shown_at = now
            text = "  ".join(f"{key} {value:.4g}" for key, value in values.items())
            line = f"tick {tick}/{self._max_ticks}  {text}  {rate:.3g} ticks/s"
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def stop(self) -> None:
        """Leave the last picture and give the terminal back."""
        self._live.stop()

    def _rate(self, tick: int) -> tuple[float, float]:
        """Return the ticks a second of late, and the time now."""
        now = time.monotonic()
        if now - self._seen[0] >= SECONDS_OF_RATE:
            self._began, self._seen = self._seen, (now, tick)
        return (tick - self._began[1]) / max(now - self._began[0], 1e-9), now

    def _table(self, tick: int, rate: float, values: Mapping[str, float]) -> Table:
        table = Table(box=None, pad_edge=False, show_header=False)
        left = f", {timedelta(seconds=round((self._max_ticks - tick) / rate))} left" if rate else ""
        bar = ProgressBar(self._max_ticks, tick, width=40)
        table.add_row(bar, f"{tick}/{self._max_ticks} ticks", f"{rate:.3g} ticks/s{left}")
        for name in self._problems:
            loss, steps = values.get(f"{name}/loss"), values.get(f"{name}/step", 0)
            table.add_row(name, "" if loss is None else f"loss {loss:.4g}", f"{steps:.0f} steps")
        for key, value in values.items():
            if key.split("/")[0] not in self._problems:
                table.add_row(key, f"{value:.4g}", "")
        return table
