"""Runs on two ranks that are killed, the parent, one of them or all, or told to stop, and go on until they are done."""

import contextlib
import json
import os
import random
import re
import shlex
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from mlotool.runner.checkpoint import read_checkpoint
from tests.runner.test_launcher import is_alive, only, ranks_of, run, start
from tests.runner.test_resume import assert_same

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for processes in /proc")

# Slow enough for a kill to meet it, and with a checkpoint at each flush.
MODULE = """
import time

from torch import nn

from mlotool.runner import checkpoint

checkpoint.LARGEST_SHARE_OF_TIME = float("inf")


class Net(nn.Sequential):
    def __init__(self, image_shape, num_classes, hidden):
        between = [nn.BatchNorm1d(16), nn.Dropout(0.3), nn.ReLU()]
        super().__init__(nn.Flatten(), nn.Linear(64, 16), *between, nn.Linear(16, 10))

    def forward(self, x):
        time.sleep(0.004)
        return super().forward(x)
"""
RECIPE = """# @package _global_
# A test's recipe.
defaults: [mwn, _self_]
name: killed
problems:
  classifier:
    module: {_target_: slow.Net, image_shape: [1, 8, 8], num_classes: 10, hidden: []}
    unroll_steps: 3
    warmup_steps: 2
"""
MAX_TICKS = 60
NUM_KILLS = 5
SETTINGS = (
    "runner.devices=2",
    f"runner.max_ticks={MAX_TICKS}",
    "runner.ticks_per_chunk=20",
    "runner.log_every=4",
    "runner.checkpoint_seconds=1e-9",
    "runner.keep_checkpoints=2",
    "runner.report=false",
    "runner.progress_bar=false",
    "runner.accelerator=cpu",
    "evaluate.splits.val=15",
    "logger=csv",
)
VARIANTS = {
    "unrolled": ("hypergradient=unrolled",),
    "finite_difference": ("hypergradient=finite_difference", "runner.log_every=7"),
}
WHOM = ("parent", "one", "all")


def words_of(folder: Path, variant: str) -> tuple[str, ...]:
    """Write what the run needs; return what follows `mlotool run`."""
    folder.mkdir()
    (folder / "slow.py").write_text(MODULE)
    (folder / "killed.yaml").write_text(RECIPE)
    return "killed.yaml", "--trust", "slow", *SETTINGS, *VARIANTS[variant]


def last_tick(folder: Path) -> int:
    found = folder.glob("outputs/killed/*/checkpoints/tick_*.ckpt")
    return max((int(path.stem.partition("_")[2]) for path in found), default=-1)


def running_ranks(parent: int) -> list[int]:
    """Return those that have begun; the parent has other children for a moment."""
    with contextlib.suppress(OSError):
        children = {child: Path(f"/proc/{child}/cmdline").read_bytes() for child in ranks_of(parent)}
        return [child for child, command in children.items() if b"\0rank\0" in command]
    return []


def kill(folder: Path, words: Sequence[str], whom: str, after: int, seconds: float = 0.0) -> bool:
    """Start or go on, and kill once `after` more ticks are saved and `seconds` over; say whether it came to that."""
    began, deadline = last_tick(folder), time.monotonic() + 200
    process = start(folder, *words, "resume=auto")
    ranks: list[int] = []
    while len(ranks) < 2 or last_tick(folder) < began + after:
        assert time.monotonic() < deadline
        if process.poll() is not None:
            assert process.returncode == 0, process.communicate()[1]
            return False
        ranks = running_ranks(process.pid)
        time.sleep(0.002)
    time.sleep(seconds)
    ranks = running_ranks(process.pid)
    victims = {"parent": [process.pid], "one": ranks[-1:], "all": [process.pid, *ranks]}[whom]
    for victim in victims:
        os.kill(victim, signal.SIGKILL)
    _, err = process.communicate(timeout=150)
    if victims:
        assert process.returncode == (137 if whom == "one" else -signal.SIGKILL) or last_tick(folder) == MAX_TICKS, err
    while any(map(is_alive, ranks)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for path in folder.glob("outputs/killed/*/checkpoints/*.ckpt"):
        read_checkpoint(path)
    return True


def run_of(folder: Path) -> Path:
    """Return the only run; a killed command may leave an empty folder beside it."""
    return only(folder, "outputs/killed/*/config.yaml").parent


def whole_run(folder: Path, variant: str) -> Path:
    code, _, err = run(folder, *words_of(folder, variant))
    assert code == 0, err
    return run_of(folder)


def finish(folder: Path, words: Sequence[str], whole: Path) -> None:
    code, _, err = run(folder, *words)
    assert code == 0, err
    assert_same(run_of(folder), whole)
    assert not list(folder.rglob("*.tmp"))


def interrupt(folder: Path, words: Sequence[str], number: int, after: int) -> tuple[str, ...]:
    """Go on, and send a signal once `after` ticks are saved; return the words that it gives for going on."""
    process = start(folder, *words, "resume=auto")
    deadline = time.monotonic() + 200
    while last_tick(folder) < after:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 128 + number, err
    found = re.search(r"mlotool: go on with: mlotool run (.*)", err)
    assert found is not None, err
    folder = run_of(folder)
    assert json.loads((folder / "summary.json").read_text())["status"] == "interrupted"
    assert after <= read_checkpoint(folder / "checkpoints" / "last.ckpt")["tick"] < MAX_TICKS
    return tuple(shlex.split(found[1]))


@pytest.mark.slow
def test_two_ranks_that_are_stopped_end_as_if_nothing_had_been(tmp_path: Path) -> None:
    """One rank is killed, then all, then comes Ctrl-C; each time the run goes on."""
    whole, folder = whole_run(tmp_path / "whole", "unrolled"), tmp_path / "parts"
    words = words_of(folder, "unrolled")
    assert kill(folder, words, "one", 10)
    assert kill(folder, words, "all", 7)
    given = interrupt(folder, words, signal.SIGINT, last_tick(folder) + 9)
    assert given[-1].startswith("resume=outputs/killed/")
    finish(folder, given, whole)
    before = {path: path.read_bytes() for path in run_of(folder).rglob("*") if path.is_file()}
    code, _, err = run(folder, *given)
    assert code == 0, err
    assert f"has finished after {MAX_TICKS} ticks; nothing is changed" in err
    assert {path: path.read_bytes() for path in run_of(folder).rglob("*") if path.is_file()} == before


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_two_ranks_that_are_killed_at_random(tmp_path: Path, variant: str) -> None:
    chance, kills, chains = random.Random(variant), 0, 0
    whole = whole_run(tmp_path / "whole", variant)
    while kills < NUM_KILLS:
        folder = tmp_path / f"chain_{chains}"
        words = words_of(folder, variant)
        while kills < NUM_KILLS and last_tick(folder) < MAX_TICKS:
            kills += kill(folder, words, chance.choice(WHOM), chance.choice((0, 1, 9)), chance.uniform(0, 1))
        finish(folder, [*words, f"resume={run_of(folder).relative_to(folder)}"], whole)
        chains += 1
    print(f"{kills} kills in {chains} chains")


@pytest.mark.slow
def test_two_ranks_that_a_cluster_ends_go_on(tmp_path: Path) -> None:
    whole, folder = whole_run(tmp_path / "whole", "finite_difference"), tmp_path / "parts"
    finish(folder, interrupt(folder, words_of(folder, "finite_difference"), signal.SIGTERM, 9), whole)
