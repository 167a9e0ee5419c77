"""Runs that are killed with SIGKILL at random moments, and go on until they are done."""

import multiprocessing
import random
import time
from pathlib import Path

import pytest

from mlotool.runner.checkpoint import read_checkpoint
from tests.runner.killed import train
from tests.runner.test_resume import assert_same

WHOLE_S = 120.0


def kill_at_random(folder: Path, chance: random.Random, num_kills: int, longest_life: float) -> tuple[int, int]:
    """Kill a run up to `num_kills` times; return how often it was killed, and how often while it wrote a checkpoint."""
    # Not fork: pytest has threads. The server has imported torch, so a run begins at once.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.runner.killed"])
    kills = within_writing = 0
    while True:
        has_begun = context.Event()
        process = context.Process(target=train, args=(folder, has_begun))
        process.start()
        assert has_begun.wait(WHOLE_S)
        process.join(chance.uniform(0.0, longest_life) if kills < num_kills else WHOLE_S)
        if process.exitcode is not None:
            assert process.exitcode == 0, (folder.parent / "output.txt").read_text()
            return kills, within_writing
        process.kill()
        process.join()
        kills += 1
        within_writing += bool(list(folder.glob("checkpoints/.*.tmp")))
        for path in folder.glob("checkpoints/*.ckpt"):
            read_checkpoint(path)


@pytest.mark.parametrize("num_kills", [4, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_runs_end_as_if_nothing_had_been(tmp_path: Path, num_kills: int) -> None:
    chance = random.Random(num_kills)
    # The first one starts the server.
    for name in ("first", "whole"):
        began = time.monotonic()
        assert kill_at_random(tmp_path / name, chance, 0, WHOLE_S) == (0, 0)
    longest_life = 0.6 * (time.monotonic() - began)
    kills = within_writing = num_chains = 0
    while kills < num_kills:
        folder = tmp_path / f"chain_{num_chains}" / "run"
        folder.parent.mkdir()
        found = kill_at_random(folder, chance, num_kills - kills, longest_life)
        kills, within_writing, num_chains = kills + found[0], within_writing + found[1], num_chains + 1
        assert_same(folder, tmp_path / "whole")
        assert not list(folder.rglob("*.tmp"))
    print(f"{kills} kills in {num_chains} chains, {within_writing} within the writing of a checkpoint")
    # So that it is training that was killed, not its start.
    if num_kills >= 50:
        assert num_chains > 3
        assert within_writing >= num_kills // 10
