"""Whatever is changed in a checkpoint, the process goes on or ends with one message."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("first", "count"), [pytest.param(1000, 32), pytest.param(0, 500, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_no_change_is_unforeseen_and_none_ends_the_process(first: int, count: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.runner.tampered", str(tmp_path), str(first), str(count)]
    environment = {**os.environ, "WANDB_MODE": "offline", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, (lines[-1:], done.stderr[-2000:])
    assert len(lines) == count
    assert not [line for line in lines if "NOT FORESEEN" in line]
    refused = [line for line in lines if "-> refused" in line]
    assert 0.2 * count < len(refused) < 0.9 * count
    assert all("xpected" in line for line in refused)
