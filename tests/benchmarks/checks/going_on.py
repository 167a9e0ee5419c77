from benchmarks.gpu.check import Check, Job, LaterError


def run(job: Job) -> None:
    num_rows = len(job.rows)
    job.row("first", lambda: {"rivals": {"one": {"ms": 1.0}}, "base": "one"}, seconds=1.0)
    if num_rows == 0:
        raise LaterError("the second row")
    job.row("second", lambda: {"value": 2.0, "text": "<b>"}, seconds=1.0)


CHECK = Check("Going on", "training", 4, 60.0, run)
