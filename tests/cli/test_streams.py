"""Stdout and stderr that take nothing, or not everything: a command does its work all the same."""

import os
import subprocess
import sys
from pathlib import Path

GONE = "(sleep 0.05; {command} 2>&1) | true; exit ${{PIPESTATUS[0]}}"
"""Its reader has gone before it says a word."""


def _called(tmp_path: Path, line: str, words: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = line.format(command=f"{sys.executable} -m mlotool {words}")
    root = str(Path(__file__).parents[2])
    known = {**os.environ, "PYTHONPATH": root, "WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(
        ["bash", "-c", command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=100,
        check=False,
        env=known,
    )


def test_a_reader_that_has_gone_ends_no_command_and_a_full_disk_is_told_once_the_work_is_done(tmp_path: Path) -> None:
    done = _called(tmp_path, GONE, "copy plain")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "recipes/plain.yaml").is_file()
    done = _called(tmp_path, "{command} > /dev/full", "copy mwn")
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith("mlotool: error: stdout: cannot be written (No space left on device)")
    assert (tmp_path / "recipes/mwn.yaml").is_file()


def test_a_run_trains_whoever_reads(tmp_path: Path) -> None:
    words = "run plain runner.max_ticks=2 runner.report=false"
    assert _called(tmp_path, "{command} >&- 2>/dev/full <&-", words).returncode == 0
    [summary] = tmp_path.glob("outputs/plain/*/summary.json")
    assert '"status": "finished"' in summary.read_text()


def test_a_word_that_is_no_text_is_refused(tmp_path: Path) -> None:
    done = _called(tmp_path, "{command}", "validate $'\\xff.yaml'", PYTHONUTF8="1")
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert r"\udcff" in line
