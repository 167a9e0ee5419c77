"""One of two ranks of a tiny run, in a process of its own."""

import contextlib
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mlotool import Unrolled
from mlotool.core.errors import Interrupted
from mlotool.problem.rank_mean import Reduce
from mlotool.program import Program
from mlotool.runner import checkpoint, run, run_config
from tests.runner.tiny import Built, lower_loss, make_built, make_config

MAX_TICKS = 40
CHANGES = {
    "runner.devices": 2,
    "runner.max_ticks": MAX_TICKS,
    "runner.log_every": 3,
    "runner.checkpoint_seconds": 1e-9,
    "runner.keep_checkpoints": 2,
    "evaluate.splits.val": 8,
}
TICK_S = 0.01


def unrolled() -> Built:
    """The steps are recorded, with dropout's random states."""
    return make_built(_slow_loss, hypergradient=Unrolled(), unroll_steps=4)


def normalised() -> Built:
    """The running statistics follow each rank's own samples between two evaluations."""
    return make_built(_slow_loss, between=[nn.BatchNorm1d(16, affine=False)], unroll_steps=2, roll_back=True)


VARIANTS: dict[str, Callable[[], Built]] = {"unrolled": unrolled, "normalised": normalised}


def train(folder: Path, variant: str, rank: int, port: int) -> None:
    """Run in `folder`, or go on there; a checkpoint is written whenever something is logged."""
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(shared, RANK=str(rank), LOCAL_RANK=str(rank))
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    run_config.build = lambda config, reduce, shared: _shared(VARIANTS[variant](), reduce)
    checkpoint.LARGEST_SHARE_OF_TIME = float("inf")
    with (
        (folder.parent / f"output_{rank}.txt").open("a") as output,
        contextlib.redirect_stderr(output),
    ):
        try:
            run(make_config(**CHANGES), output_dir=folder, resume="auto")
        except Interrupted as interrupted:
            sys.exit(interrupted.exit_code)


def _shared(built: Built, reduce: Reduce | None) -> Built:
    return replace(built, program=Program(built.program.problems.values(), built.program.graph, reduce))


def _slow_loss(batch: Any, **roles: Any) -> Any:
    time.sleep(TICK_S)
    return lower_loss(batch, **roles)
