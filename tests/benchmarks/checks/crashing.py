import os

from benchmarks.gpu.check import Check, Job


def run(job: Job) -> None:
    job.row("before the crash", lambda: {"value": 1}, seconds=1.0)
    os._exit(3)


CHECK = Check("Crashing", "speed", 1, 60.0, run)
