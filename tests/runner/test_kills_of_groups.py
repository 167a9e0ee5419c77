"""Groups of runs that are killed with SIGKILL at random moments, and go on until all are done."""

import contextlib
import json
import random
import subprocess
import time
from pathlib import Path

import pytest

from mlotool.runner.checkpoint import read_checkpoint
from tests import forked
from tests.runner.killed_group import CHANGES, MAX_TICKS, train
from tests.runner.test_resume import assert_same

WHOLE_S = 240.0


def kill_at_random(folder: Path, chance: random.Random, num_kills: int, longest_life: float) -> tuple[int, float]:
    """Kill a group up to `num_kills` times; return how often it was killed, and the seconds of its last life."""
    folder.mkdir(parents=True, exist_ok=True)
    begun = folder.parent / f"{folder.name}_has_begun"
    for kills in range(num_kills + 1):
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
        for path in folder.glob("*/checkpoints/*.ckpt"):
            read_checkpoint(path)
    raise AssertionError


@pytest.mark.parametrize("num_kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_groups_end_as_if_nothing_had_been(tmp_path: Path, num_kills: int) -> None:
    chance, whole = random.Random(num_kills), tmp_path / "whole" / "runs"
    _, seconds = kill_at_random(whole, chance, 0, WHOLE_S)
    [stack] = json.loads((whole / "fusion" / "0.json").read_text())["stacks"]
    assert stack["jobs"] == list(range(len(CHANGES)))
    assert all(each["is_fused"] for each in stack["rounds"].values())
    ends = [json.loads((whole / str(number) / "summary.json").read_text()) for number in range(len(CHANGES))]
    assert [each["status"] for each in ends] == ["finished", "finished", "failed", "finished"]
    assert [each["num_ticks"] for each in ends] == [MAX_TICKS, 7, ends[2]["num_ticks"], 16]
    kills = num_chains = 0
    while kills < num_kills:
        folder = tmp_path / f"chain_{num_chains}" / "runs"
        more, _ = kill_at_random(folder, chance, num_kills - kills, 0.8 * seconds)
        kills, num_chains = kills + more, num_chains + 1
        for number, end in enumerate(ends):
            if end["status"] == "finished":
                assert_same(folder / str(number), whole / str(number))
        found = json.loads((folder / "2" / "summary.json").read_text())
        assert found["error"].replace(str(folder), "") == ends[2]["error"].replace(str(whole), "")
        assert (folder / "2" / "metrics.csv").read_bytes() == (whole / "2" / "metrics.csv").read_bytes()
