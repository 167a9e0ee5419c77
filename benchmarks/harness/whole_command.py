"""What a whole command of mlotool takes: CPU time of all its processes, with their imports, and wall time."""

import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def whole_command(words: Sequence[str], folder: Path) -> dict[str, float]:
    """Run `mlotool WORDS` of this checkout in `folder`, with one thread a process; return `cpu_s` and `wall_s`.

    A command that fails ends the benchmark with the end of its standard error.
    """
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    result = subprocess.run(
        [sys.executable, "-m", "mlotool", *words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if result.returncode:
        raise SystemExit(result.stderr[-2000:])
    return {"cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, "wall_s": wall}
