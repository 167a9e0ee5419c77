"""The process of a job, or of several, started in the same way by every launcher."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from mlotool.core.files import writing
from mlotool.sweep.job_folder import log_of

MODULE = "mlotool.cli.sweep_job"
STOP = b"s"


def start_process(folders: Sequence[Path], environment: Mapping[str, str], module: str) -> "subprocess.Popen[bytes]":
    """Start the jobs that folders describe; it ends when this process dies, or when STOP is written to its input.

    Args:
        folders: the jobs'.
        environment: variables that it gets beside those of this process.
        module: what `python -m` runs, MODULE but in tests.
    """
    with open_log(folders) as log:
        return subprocess.Popen(
            [sys.executable, "-m", module, *map(str, folders)],
            # A pipe of which nobody else has the other end: the job sees it close, however this process dies.
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            # A Ctrl-C on the terminal is for the sweep, which then stops its jobs.
            start_new_session=True,
        )


def open_log(folders: Sequence[Path]) -> BinaryIO:
    """Open the file that takes what the process of these jobs prints."""
    path = log_of(folders)
    with writing(path):
        path.parent.mkdir(exist_ok=True)
        return path.open("ab")


def run_process(folders: Sequence[str], environment: Mapping[str, str], module: str) -> int:
    """Run jobs to their end, on the machine where a cluster calls this; return the exit code."""
    return start_process([Path(each) for each in folders], environment, module).wait()
