"""Stands in for a job's process: writes what a run of mlotool writes, and trains nothing; and a sweep of such jobs."""

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from mlotool.cli.sweep_job import _end_with_parent
from mlotool.sweep import driver
from mlotool.sweep.folder import note_failure, read_job
from tests import forked


def sweep(words: tuple[str, ...]) -> int:
    """Be `mlotool WORDS`, the jobs of whose sweeps are such."""
    # A shell gives what it runs in the background a SIGINT that is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    driver.MODULE = "tests.sweep.tiny_job"
    return forked.call_mlotool(words)


def main(folders: Sequence[Path]) -> int:
    _end_with_parent()
    codes = [_run(folder) for folder in folders if not (folder / "summary.json").exists()]
    return max(codes)


def _run(folder: Path) -> int:
    spec = read_job(folder)
    values = dict(word.split("=", 1) for word in spec.words)
    number = float(values.get("seed", 0))
    (folder / "overrides.txt").write_text("\n".join(spec.words))
    (folder / "began.json").write_text(
        json.dumps({"at": time.time(), "devices": os.environ.get("CUDA_VISIBLE_DEVICES"), "pid": os.getpid()})
    )
    if number == 13:
        note_failure(folder, spec.words, "thirteen is refused")
        return 1
    if number == 14:
        os.kill(os.getpid(), signal.SIGSEGV)
    watch = None
    if spec.study is not None:
        from mlotool.sweep.study import Watcher

        watch = Watcher(**spec.study)
    status = "finished"
    for tick in range(1, 6):
        time.sleep(float(values.get("runner.max_ticks", 10)) / 1000)
        if watch is not None and watch(tick, number * tick) and tick < 5:
            status = "pruned"
            break
    (folder / "ended.json").write_text(json.dumps({"at": time.time()}))
    objective = {"key": "val/accuracy", "value": number * tick, "mode": "max"}
    (folder / "summary.json").write_text(json.dumps({"status": status, "objective": objective, "error": None}))
    return 0


if __name__ == "__main__":
    sys.exit(main([Path(each) for each in sys.argv[1:]]))
