import signal
import time

from benchmarks.gpu.check import Check, Job


def run(job: Job) -> None:
    job.row("before it hangs", lambda: {"value": 1}, seconds=1.0)
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    time.sleep(600)


CHECK = Check("Hanging", "speed", 2, 8.0, run)
