"""The tests marked `gpu`, on the device: closed forms, every hypergradient, replay, resume, precision and more."""

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from benchmarks.gpu.check import Check, Job, LaterError

ROOT = Path(__file__).parents[3]
TESTS = ROOT / "tests" / "gpu"


def run(job: Job) -> None:
    """Run each file of tests/gpu by pytest, a row a file."""
    for file in sorted(TESTS.glob("test_*.py")):
        job.row(file.stem, lambda file=file: _tested(job, file), seconds=10.0)


def _tested(job: Job, file: Path) -> dict[str, Any]:
    report = Path(tempfile.mkdtemp()) / "report.xml"
    command = [sys.executable, "-m", "pytest", str(file), "-m", "gpu", f"--junit-xml={report}", "-q", "--tb=short"]
    environment = {**os.environ, "MLOTOOL_TEST_DEVICE": job.device.type, "WANDB_MODE": "disabled"}
    # What other packages bring along, their plugins and the ways of another version of Python, is not asked here.
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    command += ["-W", "default::DeprecationWarning", "-W", "default::FutureWarning"]
    try:
        done = subprocess.run(
            [*command, "-p", "no:cacheprovider", "--color=no"],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=max(5.0, job.seconds_left - 2.0),
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise LaterError(f"{file.stem} had no time left to end") from None
    if not report.is_file():
        return {"error": (done.stdout + done.stderr)[-4_000:]}
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    counts = {key: int(suite.get(key, "0")) for key in ("tests", "failures", "errors", "skipped")}
    found: dict[str, Any] = {**counts, "seconds": float(suite.get("time", "0"))}
    if counts["failures"] or counts["errors"] or done.returncode:
        found["error"] = done.stdout[-8_000:]
    return found


CHECK = Check("Correctness: the tests marked gpu", "correctness", 10, 420.0, run)
