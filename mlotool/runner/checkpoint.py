"""Checkpoints: which are kept, what they hold, how they are read."""

import time
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import Checkpoint, EarlyStopping, ModelCheckpoint

from mlotool.core.errors import RunError
from mlotool.program import Program
from mlotool.runner.ranks import Ranks

# Our part of a Lightning checkpoint.
STATE_KEY = "mlotool"


# A small checkpoint takes as long as two ticks of a small problem, a large one seconds.
SECONDS_BETWEEN_LAST = 5.0
LARGEST_SHARE_OF_TIME = 0.01


class LastCheckpoint(Checkpoint):
    """Writes `last.ckpt`: before the first tick, at the first round's end, then at the end of rounds, but not too
    often, and at the run's.

    Not a ModelCheckpoint: one that writes each round costs 2-3% of a run with ticks of 2 ms, and none of its
    intervals covers the last round.

    Args:
        path: the file.
        seconds_between: least time between two writes; more where they take more than a hundredth of the time.
        ranks: of which all write at the same moment, when rank 0 says so.
    """

    def __init__(self, path: Path, seconds_between: float = SECONDS_BETWEEN_LAST, ranks: Ranks | None = None) -> None:
        self._ranks = ranks or Ranks()
        self._path = path
        self._seconds_between = self._pause = seconds_between
        self._written_at = float("-inf")
        self._written_step = -1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write before the first tick: a run that fails in its first round has a good state too."""
        self._write(trainer)
        self._written_at = float("-inf")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write after a round, if it is time."""
        if self._ranks.first(time.monotonic() - self._written_at >= self._pause):
            self._write(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write after the last tick, an early stop or Ctrl-C; an error does not come here."""
        self._write(trainer)

    def _write(self, trainer: Trainer) -> None:
        if self._written_step == trainer.global_step:
            return
        began = time.monotonic()
        trainer.save_checkpoint(self._path)
        self._written_step, self._written_at = trainer.global_step, time.monotonic()
        self._pause = max(self._seconds_between, (self._written_at - began) / LARGEST_SHARE_OF_TIME)


def checkpoint_callbacks(directory: Path, monitor: str | None, mode: str, ranks: Ranks | None = None) -> list[Callback]:
    """Return what writes `best.ckpt`, when the objective is the best so far, and `last.ckpt`.

    Args:
        directory: where they go.
        monitor: the objective's key; None keeps no best one.
        mode: "min" or "max".
        ranks: those of the run.
    """
    callbacks: list[Callback] = []
    if monitor is not None:
        best = ModelCheckpoint(
            directory,
            "best",
            monitor=monitor,
            mode=mode,
            enable_version_counter=False,
            save_on_train_epoch_end=True,
        )
        callbacks.append(best)
    # After the best one, whose state it holds.
    return [*callbacks, LastCheckpoint(directory / "last.ckpt", ranks=ranks)]


def early_stopping(monitor: str, mode: str, patience: int) -> EarlyStopping:
    """Return what stops after `patience` evaluations without a better objective."""
    return EarlyStopping(monitor, mode=mode, patience=patience, strict=False, check_on_train_epoch_end=True)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return our part of a checkpoint: program, schedule, random state, tick, metrics.

    Nothing in the file is executed (`weights_only=True`); the tensors are on the CPU.
    """
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    if STATE_KEY not in checkpoint:
        raise RunError(
            f"{path} is not a checkpoint of mlotool: it has no '{STATE_KEY}' entry; expected one that a run wrote. "
            "Name the run folder whose checkpoints/ holds it."
        )
    state: dict[str, Any] = checkpoint[STATE_KEY]
    return state


def load_program(program: Program, path: Path) -> dict[str, Any]:
    """Put the program into the state of a checkpoint, on the devices where its modules are; return our part of it."""
    state = read_checkpoint(path)
    program.load_state_dict(state["program"])
    return state
