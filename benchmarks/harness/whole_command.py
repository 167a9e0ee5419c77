"""What a whole command of mlotool takes: CPU time of all its processes, with their imports, and wall time."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def whole_command(words: Sequence[str], folder: Path) -> dict[str, float]:
    """Run `mlotool WORDS` of this checkout in `folder`, with one thread a process; return `cpu_s` and `wall_s`.

    A command that fails ends the benchmark with the end of its standard error.
    """
    began = time.perf_counter()
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "mlotool", *words],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
        # Of this process and those that it has waited for: another command beside it does not count.
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        errors.seek(0)
        if process.returncode:
            raise SystemExit(errors.read().decode()[-2000:])
    return {"cpu_s": used.ru_utime + used.ru_stime, "wall_s": time.perf_counter() - began}
