"""A run in a process of its own, slow at what a kill may meet."""

import contextlib
import io
import time
from pathlib import Path
from typing import Any

import torch

from mlotool.core import files
from mlotool.runner import checkpoint, run, run_config
from tests.runner.tiny import make_built, make_config

MAX_TICKS = 24
DELAY_S = 0.004
CHANGES = {
    "runner.max_ticks": MAX_TICKS,
    "runner.log_every": 7,
    "runner.checkpoint_seconds": 1e-9,
    "runner.keep_checkpoints": 2,
}


def train(folder: Path, begun: Path) -> None:
    """Run in `folder`, or go on there; a checkpoint is written after every tick, in two halves; `begun` is a sign."""
    run_config.build = lambda config, reduce, shared: make_built(scheduler=_scheduler)
    checkpoint.LARGEST_SHARE_OF_TIME = float("inf")
    _slow_down()
    begun.touch()
    with (folder.parent / "output.txt").open("a") as output, contextlib.redirect_stderr(output):
        run(make_config(**CHANGES), output_dir=folder, resume="auto")


def _scheduler(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 7, gamma=0.5)


def _slow_down() -> None:
    save, sync = torch.save, files.sync

    def save_in_halves(content: Any, file: Any) -> None:
        whole = io.BytesIO()
        save(content, whole)
        content = whole.getvalue()
        file.write(content[: len(content) // 2])
        file.flush()
        time.sleep(DELAY_S)
        file.write(content[len(content) // 2 :])

    def sync_slowly(path: Path) -> None:
        time.sleep(DELAY_S / 4)
        sync(path)
        time.sleep(DELAY_S / 4)

    torch.save, files.sync = save_in_halves, sync_slowly
