"""Runs, groups of runs and ranks that are killed with SIGKILL at random moments, and go on until they are done."""

import contextlib
import io
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mlotool import Unrolled
from mlotool.core.errors import Interrupted
from mlotool.folders import files
from mlotool.problem.rank_mean import Reduce
from mlotool.program import Program
from mlotool.runner import checkpoint, run, run_config
from mlotool.runner.checkpoint import read_checkpoint
from tests import forked
from tests.runner import test_together
from tests.runner.test_resume import assert_same
from tests.runner.test_run_config import read_summary
from tests.runner.tiny import Built, lower_loss, make_built, make_config

MAX_TICKS = 16
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
    slow_down(DELAY_S)
    begun.touch()
    with (folder.parent / "output.txt").open("a") as output, contextlib.redirect_stderr(output):
        run(make_config(**CHANGES), output_dir=folder, resume="auto")


def _scheduler(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 7, gamma=0.5)


def slow_down(seconds: float) -> None:
    save, sync = torch.save, files.sync

    def save_in_halves(content: Any, file: Any) -> None:
        whole = io.BytesIO()
        save(content, whole)
        content = whole.getvalue()
        file.write(content[: len(content) // 2])
        file.flush()
        time.sleep(seconds)
        file.write(content[len(content) // 2 :])

    def sync_slowly(path: Path) -> None:
        time.sleep(seconds / 4)
        sync(path)
        time.sleep(seconds / 4)

    torch.save, files.sync = save_in_halves, sync_slowly


WHOLE_S = 120.0


def kill_at_random(
    train: Callable[..., None], folder: Path, chance: random.Random, num_kills: int, longest_life: float
) -> tuple[int, float]:
    """Kill a run up to `num_kills` times; return how often it was killed, and the seconds of its last life."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    begun = folder.parent / f"{folder.name}_has_begun"
    kills = 0
    while True:
        begun.unlink(missing_ok=True)
        process = forked.start(train, folder, begun)
        deadline = time.monotonic() + WHOLE_S
        while not begun.exists():
            assert time.monotonic() < deadline
            time.sleep(0.002)
        began = time.monotonic()
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(chance.uniform(0.0, longest_life) if kills < num_kills else WHOLE_S)
            assert code == 0, (folder.parent / "output.txt").read_text()
            return kills, time.monotonic() - began
        process.kill()
        process.wait()
        kills += 1
        for path in folder.rglob("checkpoints/*.ckpt"):
            read_checkpoint(path)


def ends(train: Callable[..., None], folder: Path, num_kills: int) -> list[Path]:
    """Run once without a kill, then until there were as many; return the folders of the runs that came to an end."""
    found, chance, kills = [folder / "0" / "run"], random.Random(num_kills), 0
    _, seconds = kill_at_random(train, found[0], chance, 0, WHOLE_S)
    while kills < num_kills:
        found.append(folder / str(len(found)) / "run")
        kills += kill_at_random(train, found[-1], chance, num_kills - kills, 0.9 * seconds)[0]
    return found


@pytest.mark.parametrize("num_kills", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_runs_end_as_if_nothing_had_been(tmp_path: Path, num_kills: int) -> None:
    whole, *chains = ends(train, tmp_path, num_kills)
    for folder in chains:
        assert_same(folder, whole)
        assert not list(folder.rglob("*.tmp"))


def train_group(folder: Path, begun: Path) -> None:
    """Run a group in `folder`, or go on there; `begun` is a sign."""
    checkpoint.LARGEST_SHARE_OF_TIME = float("inf")
    slow_down(DELAY_S / 2)
    begun.touch()
    with (folder.parent / "output.txt").open("a") as output, contextlib.redirect_stderr(output):
        test_together.train(folder, "runner.checkpoint_seconds=1e-9")


@pytest.mark.slow
@pytest.mark.parametrize("num_kills", [1, 20])
def test_killed_groups_end_as_if_nothing_had_been(tmp_path: Path, num_kills: int) -> None:
    whole, *chains = ends(train_group, tmp_path, num_kills)
    for folder in chains:
        for number in "01":
            assert_same(folder / number, whole / number)


MAX_TICKS_OF_RANKS = 20
CHANGES_OF_RANKS = {
    "runner.devices": 2,
    "runner.max_ticks": MAX_TICKS_OF_RANKS,
    "runner.log_every": 3,
    "runner.checkpoint_seconds": 1e-9,
    "runner.keep_checkpoints": 2,
    "evaluate.splits.val": 8,
}
TICK_S = 0.01


def build_shared(reduce: Reduce | None) -> Built:
    """Steps are recorded, with dropout's random states; running statistics follow each rank's own samples."""
    between = [nn.BatchNorm1d(16, affine=False)]
    built = make_built(_slow_loss, hypergradient=Unrolled(), unroll_steps=4, between=between, roll_back=True)
    return replace(built, program=Program(built.program.problems.values(), built.program.graph, reduce))


def train_rank(folder: Path) -> None:
    """Run in `folder`, or go on there; a checkpoint is written whenever something is logged."""
    torch.set_num_threads(1)
    run_config.build = lambda config, reduce, shared: build_shared(reduce)
    checkpoint.LARGEST_SHARE_OF_TIME = float("inf")
    with (folder.parent / "output.txt").open("a") as output, contextlib.redirect_stderr(output):
        try:
            run(make_config(**CHANGES_OF_RANKS), output_dir=folder, resume="auto")
        except Interrupted as interrupted:
            sys.exit(interrupted.exit_code)


def _slow_loss(batch: Any, **roles: Any) -> Any:
    time.sleep(TICK_S)
    return lower_loss(batch, **roles)


def stop_ranks(folder: Path, after: int | None = None, number: int = signal.SIGKILL) -> None:
    """Let two ranks go on, and send rank 1 a signal once tick `after` is saved; None lets them finish."""
    folder.parent.mkdir(exist_ok=True)
    shared = run_config._shared_environment(2)
    ranks = [
        forked.start(train_rank, folder, environment={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]
    deadline = time.monotonic() + WHOLE_S
    while after is not None and last_tick(folder) < after:
        assert time.monotonic() < deadline
        assert all(each.poll() is None for each in ranks), (folder.parent / "output.txt").read_text()
        time.sleep(0.002)
    if after is not None:
        ranks[1].send_signal(number)
        if number == signal.SIGKILL:
            # What the launcher does with the other.
            ranks[0].kill()
    codes = [each.wait(WHOLE_S) for each in ranks]
    for path in folder.glob("checkpoints/*.ckpt"):
        read_checkpoint(path)
    if after is None or number != signal.SIGKILL:
        # Also of the one that was not told.
        assert codes == [0 if after is None else 128 + number] * 2, (folder.parent / "output.txt").read_text()


def last_tick(folder: Path) -> int:
    found = folder.glob("checkpoints/tick_*.ckpt")
    return max((int(path.stem.partition("_")[2]) for path in found), default=-1)


def test_two_ranks_end_as_if_nothing_had_been(tmp_path: Path) -> None:
    """They are killed, then one is told to stop, and stops with the other."""
    whole, parts = tmp_path / "whole" / "run", tmp_path / "parts" / "run"
    stop_ranks(whole)
    stop_ranks(parts, 4)
    stop_ranks(parts, last_tick(parts) + 4, signal.SIGTERM)
    assert read_summary(parts)["status"] == "interrupted"
    assert 8 <= read_checkpoint(parts / "checkpoints" / "last.ckpt")["tick"] <= MAX_TICKS_OF_RANKS
    stop_ranks(parts)
    assert_same(parts, whole)
    before = {path: path.read_bytes() for path in parts.rglob("*") if path.is_file()}
    stop_ranks(parts)
    assert {path: path.read_bytes() for path in parts.rglob("*") if path.is_file()} == before
    said = (tmp_path / "parts" / "output.txt").read_text()
    assert f"has finished after {MAX_TICKS_OF_RANKS} ticks; nothing is changed" in said
