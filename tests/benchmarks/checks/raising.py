from benchmarks.gpu.check import Check, Job


def _divided() -> dict[str, float]:
    return {"value": 1 / 0}


def run(job: Job) -> None:
    job.row("wrong", _divided, seconds=1.0)
    job.row("right", lambda: {"value": 2}, seconds=1.0)


CHECK = Check("Raising", "memory", 3, 60.0, run)
