"""A job's process, started in the same way by every launcher."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from mlotool.sweep.job_folder import LOG

MODULE = "mlotool.cli.sweep_job"
STOP = b"s"


def start_process(folder: Path, environment: Mapping[str, str], module: str) -> "subprocess.Popen[bytes]":
    """Start the job that a folder describes; it ends when this process dies, or when STOP is written to its input.

    Args:
        folder: the job's.
        environment: variables that it gets beside those of this process.
        module: what `python -m` runs, MODULE but in tests.
    """
    with (folder / LOG).open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", module, str(folder)],
            # A pipe of which nobody else has the other end: the job sees it close, however this process dies.
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            # A Ctrl-C on the terminal is for the sweep, which then stops its jobs.
            start_new_session=True,
        )


def run_process(folder: str, environment: Mapping[str, str], module: str) -> int:
    """Run a job to its end, on the machine where a cluster calls this; return its exit code."""
    return start_process(Path(folder), environment, module).wait()
