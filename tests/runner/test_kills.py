"""Runs that are killed with SIGKILL at random moments, and go on until they are done."""

import contextlib
import random
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from mlotool.runner.checkpoint import read_checkpoint
from tests import forked
from tests.runner import killed_ranks
from tests.runner.killed import train
from tests.runner.test_resume import assert_same
from tests.runner.test_run_config import read_summary

WHOLE_S = 120.0


def kill_at_random(folder: Path, chance: random.Random, num_kills: int, longest_life: float) -> tuple[int, int]:
    """Kill a run up to `num_kills` times; return how often it was killed, and how often while it wrote a checkpoint."""
    begun = folder.parent / f"{folder.name}_has_begun"
    kills = within_writing = 0
    while True:
        begun.unlink(missing_ok=True)
        process = forked.start(train, folder, begun)
        deadline = time.monotonic() + WHOLE_S
        while not begun.exists():
            assert time.monotonic() < deadline
            time.sleep(0.002)
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(chance.uniform(0.0, longest_life) if kills < num_kills else WHOLE_S)
            assert code == 0, (folder.parent / "output.txt").read_text()
            return kills, within_writing
        process.kill()
        process.wait()
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
    # So that it is training that was killed, not its start.
    if num_kills >= 50:
        assert num_chains > 3
        assert within_writing >= num_kills // 10


def stop_ranks(
    folder: Path, variant: str, after: int | None, number: int, whom: tuple[int, ...], seconds: float = 0.0
) -> None:
    """Let two ranks go on, and send some of them a signal once tick `after` is saved; None lets them finish.

    The signal comes `seconds` later; those that it does not kill live as long again.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [forked.start(killed_ranks.train, folder, variant, rank, port) for rank in range(2)]
    deadline = time.monotonic() + WHOLE_S
    while after is not None and last_tick(folder) < after:
        assert time.monotonic() < deadline
        assert all(each.poll() is None for each in ranks), output_of(folder)
        time.sleep(0.002)
    time.sleep(seconds)
    for rank in whom:
        ranks[rank].send_signal(number)
    if after is not None and number == signal.SIGKILL:
        # What the launcher does with the others.
        ranks[whom[0]].wait(WHOLE_S)
        with contextlib.suppress(subprocess.TimeoutExpired):
            ranks[1 - whom[0]].wait(seconds)
        for each in ranks:
            each.kill()
    codes = [each.wait(WHOLE_S) for each in ranks]
    for path in folder.glob("checkpoints/*.ckpt"):
        read_checkpoint(path)
    if number != signal.SIGKILL or after is None:
        # Also the one that was not told.
        assert codes == [0 if after is None else 128 + number] * 2, output_of(folder)


def last_tick(folder: Path) -> int:
    found = folder.glob("checkpoints/tick_*.ckpt")
    return max((int(path.stem.partition("_")[2]) for path in found), default=-1)


def output_of(folder: Path) -> str:
    return "".join(path.read_text() for path in folder.parent.glob("output_*.txt"))


@pytest.mark.parametrize("variant", killed_ranks.VARIANTS)
def test_two_ranks_end_as_if_nothing_had_been(tmp_path: Path, variant: str) -> None:
    """Rank 1 is killed, then both are, then one is told to stop, and stops with the other."""
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole, parts = tmp_path / "whole" / "run", tmp_path / "parts" / "run"
    stop_ranks(whole, variant, None, signal.SIGKILL, ())
    stop_ranks(parts, variant, 6, signal.SIGKILL, (1,))
    stop_ranks(parts, variant, last_tick(parts) + 7, signal.SIGKILL, (0, 1))
    stop_ranks(parts, variant, last_tick(parts) + 2, signal.SIGTERM, (1,))
    assert read_summary(parts)["status"] == "interrupted"
    assert 15 <= read_checkpoint(parts / "checkpoints" / "last.ckpt")["tick"] < killed_ranks.MAX_TICKS
    stop_ranks(parts, variant, None, signal.SIGKILL, ())
    assert_same(parts, whole)
    before = {path: path.read_bytes() for path in parts.rglob("*") if path.is_file()}
    stop_ranks(parts, variant, None, signal.SIGKILL, ())
    assert {path: path.read_bytes() for path in parts.rglob("*") if path.is_file()} == before
    assert f"has finished after {killed_ranks.MAX_TICKS} ticks; nothing is changed" in output_of(parts)
