"""Where logged numbers go: metrics.csv always, W&B and TensorBoard by choice."""

import csv
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from pytorch_lightning.loggers import Logger

from mlotool.core.errors import ConfigError
from mlotool.runner.folder import plain

if TYPE_CHECKING:
    from wandb.sdk.wandb_run import Run

SECONDS_BETWEEN_FLUSHES = 1.0
MODES = ("offline", "online", "disabled")


class MetricLog:
    """Writes `tick,key,value` lines and passes the same numbers on to the loggers.

    Args:
        path: of metrics.csv; lines are appended.
    """

    def __init__(self, path: Path) -> None:
        self.last: dict[str, float] = {}
        self._loggers: list[Logger] = []
        self._flushed_at = float("-inf")
        is_new = not path.exists() or path.stat().st_size == 0
        self._file: TextIO = path.open("a", newline="")
        self._writer = csv.writer(self._file, lineterminator="\n")
        if is_new:
            self._writer.writerow(("tick", "key", "value"))

    def send_to(self, loggers: Iterable[Logger]) -> None:
        """Pass what is logged from now on to Lightning's loggers as well."""
        self._loggers = list(loggers)

    def log(self, tick: int, values: Mapping[str, float]) -> None:
        """Log `values` at `tick`."""
        if not values:
            return
        self.last.update(values)
        # Nine digits give a float32 back exactly.
        self._writer.writerows((tick, key, f"{value:.9g}") for key, value in values.items())
        if time.monotonic() - self._flushed_at >= SECONDS_BETWEEN_FLUSHES:
            self.flush()
        for logger in self._loggers:
            logger.log_metrics(dict(values), step=tick)

    def flush(self) -> None:
        """Write what is still in memory, as is done every second."""
        self._file.flush()
        self._flushed_at = time.monotonic()

    def close(self) -> None:
        """Close metrics.csv."""
        self._file.close()


@contextmanager
def open_loggers(
    config: Any, run_dir: Path, problems: Iterable[str], sweep: str | None = None
) -> Iterator[list[Logger]]:
    """Open the loggers that the config asks for; finish them in any case.

    Args:
        config: the whole config; its `logger` node chooses.
        run_dir: the run folder.
        problems: names of the problems: each gets an axis of its own in W&B, its steps.
        sweep: name of the sweep's folder: its jobs are one group in W&B.
    """
    settings = config.logger
    if settings.mode not in MODES:
        raise ConfigError(f"logger.mode: found '{settings.mode}'; expected one of {', '.join(MODES)}. Correct it.")
    loggers: list[Logger] = []
    run: Run | None = None
    is_success = False
    try:
        if settings.wandb and settings.mode != "disabled":
            run = _start_wandb(config, run_dir, problems, sweep)
            loggers.append(_wandb_logger(run, run_dir))
        if settings.tensorboard:
            loggers.append(_tensorboard_logger(run_dir))
        yield loggers
        is_success = True
    finally:
        for logger in loggers:
            logger.finalize("success" if is_success else "failed")
        if run is not None:
            run.finish(exit_code=0 if is_success else 1)


def _start_wandb(config: Any, run_dir: Path, problems: Iterable[str], sweep: str | None) -> "Run":
    # Imported here: it takes a second, and runs without W&B need not have it.
    import wandb

    mode = config.logger.mode
    try:
        with _without_empty_mode():
            run = wandb.init(
                project=config.logger.project,
                name=f"{config.name}/{run_dir.name}",
                group=sweep or config.name,
                dir=str(run_dir),
                mode=mode,
                config=plain(config),
                # A run that the user's own code has open is left alone.
                reinit="create_new",
                settings=wandb.Settings(silent=True, console="off"),
            )
    # Its settings are checked by pydantic, whose errors are ValueErrors.
    except (wandb.Error, ValueError) as error:
        reason = " ".join(str(error).split())
        advice = (
            "Run `wandb login`, or set logger.mode=offline."
            if mode == "online"
            else "Correct the WANDB_ variables of the environment, or set logger.mode=disabled."
        )
        raise ConfigError(
            f"logger.mode: found '{mode}', with which W&B does not start ({reason.rstrip('.')}); expected "
            f"{'an account, and a service that answers' if mode == 'online' else 'settings that W&B takes'}. {advice}"
        ) from error
    run.define_metric("trainer/global_step")
    run.define_metric("*", step_metric="trainer/global_step", step_sync=True)
    for name in problems:
        run.define_metric(f"{name}/step")
        run.define_metric(f"{name}/*", step_metric=f"{name}/step")
    return run


@contextmanager
def _without_empty_mode() -> Iterator[None]:
    # W&B refuses WANDB_MODE='', which elsewhere means that it is not set.
    if os.environ.get("WANDB_MODE") != "":
        yield
        return
    del os.environ["WANDB_MODE"]
    try:
        yield
    finally:
        os.environ["WANDB_MODE"] = ""


def _wandb_logger(run: "Run", run_dir: Path) -> Logger:
    from pytorch_lightning.loggers import WandbLogger

    # Not WandbLogger(offline=True): it sets WANDB_MODE for the whole process.
    return WandbLogger(experiment=run, save_dir=run_dir)


def _tensorboard_logger(run_dir: Path) -> Logger:
    from pytorch_lightning.loggers import TensorBoardLogger

    try:
        return TensorBoardLogger(run_dir, name="tensorboard", version="")
    except ModuleNotFoundError as error:
        raise ConfigError(
            "logger.tensorboard: found true, but the package tensorboard is not installed; "
            "run `pip install mlotool[tensorboard]`, or set logger.tensorboard=false."
        ) from error
