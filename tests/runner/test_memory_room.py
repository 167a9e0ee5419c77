"""Whether one more run fits is decided by what the largest one has taken so far."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from mlotool.runner import together
from mlotool.runner.together import MemoryRoom

KB = 1024


class Machine:
    """Says how much memory is free, in kB, in the files that Linux has."""

    def __init__(self, folder: Path, total: int) -> None:
        self.meminfo, self.limit, self.use = folder / "meminfo", folder / "limit", folder / "use"
        self.total = total

    def has(self, free: int) -> None:
        self.meminfo.write_text(f"MemTotal: {self.total} kB\nMemFree: 1 kB\nMemAvailable: {free} kB\nHugePages: 0\n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(tmp_path, 1000)
    monkeypatch.setattr(together, "_MEMINFO", machine.meminfo)
    monkeypatch.setattr(together, "_GROUPS", ((machine.limit, machine.use),))
    return machine


def asked(machine: Machine, free: Sequence[int]) -> list[bool]:
    """Return what is said after each run, given what is free before the first and after each."""
    machine.has(free[0])
    room, said = MemoryRoom(torch.device("cpu")), []
    for each in free[1:]:
        machine.has(each)
        said.append(room.takes_one_more())
    return said


@pytest.mark.parametrize(
    ("free", "said"),
    [
        # A quarter stays free, and each run takes its memory twice: once to begin, and once to train.
        ([1000, 900, 800, 700], [True, True, True]),
        ([1000, 900, 450, 449], [True, False, False]),
        ([1000, 630], [False]),
        ([1000, 740], [False]),
        ([1000, 750], [True]),
        # The largest one counts, whatever came after it.
        ([1000, 800, 790, 660, 640], [True, True, True, False]),
        # Others may have let go of some meanwhile.
        ([500, 600, 700], [True, True]),
    ],
)
def test_what_is_left_after_the_largest_run(machine: Machine, free: list[int], said: list[bool]) -> None:
    assert asked(machine, free) == said


def test_the_limit_of_a_container_counts(machine: Machine) -> None:
    machine.limit.write_text(f"{400 * KB}\n")
    machine.use.write_text(f"{100 * KB}\n")
    machine.has(1000)
    room = MemoryRoom(torch.device("cpu"))
    machine.use.write_text(f"{170 * KB}\n")
    assert not room.takes_one_more() or 400 - 170 - 2 * 70 >= 100
    machine.use.write_text(f"{180 * KB}\n")
    assert not room.takes_one_more()


def test_where_nothing_is_known_there_is_room(machine: Machine) -> None:
    machine.meminfo.write_text("MemTotal: 1000 kB\n")
    room = MemoryRoom(torch.device("cpu"))
    assert room.takes_one_more()
