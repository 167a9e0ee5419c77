"""Runs that are killed with SIGKILL at random moments, and go on until they are done."""

import multiprocessing
import random
from pathlib import Path

import pytest

from mlotool.runner.checkpoint import read_checkpoint
from tests.runner.killed import train
from tests.runner.test_resume import assert_same

LONGEST_LIFE_S = 0.8


def kill_at_random(folder: Path, chance: random.Random, num_kills: int) -> tuple[int, int]:
    """Kill a run up to `num_kills` times; return how often it was killed, and how often while it wrote a checkpoint."""
    # Not fork: pytest has threads. The server has imported torch, so a run begins at once.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.runner.killed"])
    kills = within_writing = 0
    while True:
        process = context.Process(target=train, args=(folder,))
        process.start()
        process.join(chance.uniform(0.0, LONGEST_LIFE_S) if kills < num_kills else 120)
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
    assert kill_at_random(tmp_path / "whole", chance, 0) == (0, 0)
    kills = within_writing = chain = 0
    while kills < num_kills:
        folder = tmp_path / f"chain_{chain}" / "run"
        folder.parent.mkdir()
        found = kill_at_random(folder, chance, num_kills - kills)
        kills, within_writing, chain = kills + found[0], within_writing + found[1], chain + 1
        assert_same(folder, tmp_path / "whole")
        assert not list(folder.rglob("*.tmp"))
    assert kills == num_kills
    if num_kills >= 50:
        assert within_writing >= num_kills // 10
