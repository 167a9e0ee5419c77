"""One cycle of Meta-Weight-Net on models of real size: a loop written by hand, Betty, mlotool."""

import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.betty import bare, ours
from benchmarks.betty.rival import Rival
from benchmarks.betty.task import Task
from benchmarks.gpu.check import Check, Job
from benchmarks.harness import memory
from benchmarks.harness.rounds import Cycle, interleave, summarize

ALGORITHMS = ("fd", "neumann", "cg")
Build = Callable[[], Rival]


def check(title: str, model: str, order: int, seconds: float) -> Check:
    """Return the check of one model."""
    return Check(title, "speed", order, seconds, partial(_run, model=model))


def _run(job: Job, model: str) -> None:
    if job.betty is not None:
        sys.path.insert(0, str(job.betty))
    for precision in ("fp32", "bf16"):
        for algorithm in ALGORITHMS:
            task = Task(model, algorithm, job.device.type, precision=precision, is_small=job.is_small)
            job.row(f"{algorithm}, {precision}", partial(_compare, job, task), seconds=20.0)


def _compare(job: Job, task: Task) -> dict[str, Any]:
    rivals = _rivals(job, task)
    peaks = {name: memory.peak_bytes(_anew(build), on_cuda=not job.is_small) for name, build in rivals.items()}
    # Built once: a compiled module takes long to build.
    built = {name: build().cycle for name, build in rivals.items()}
    seconds = _seconds_of_a_cycle(built)
    num_rounds, num_cycles = (3, 1) if job.is_small else (15, max(1, min(20, round(0.15 / seconds))))
    found = interleave(
        {name: _kept(cycle) for name, cycle in built.items()}, num_rounds=num_rounds, num_cycles=num_cycles
    )
    times = summarize(found, next(iter(rivals)), "wall")
    return {
        "num_parameters": sum(parameter.numel() for parameter in task.make_classifier().parameters()),
        "batch_size": task.batch_sizes[0],
        "num_rounds": num_rounds,
        "num_cycles": num_cycles,
        "rivals": {name: {**times[name], "peak_mib": peaks[name] / 2**20} for name in rivals},
    }


def _rivals(job: Job, task: Task) -> dict[str, Build]:
    """Return who is compared; ratios are to the first."""
    rivals: dict[str, Build] = {}
    # Betty's autocast is CUDA's alone.
    if job.betty is not None and not (job.is_small and task.precision != "fp32"):
        from benchmarks.betty import peer

        rivals["Betty"] = partial(peer.build, task)
    rivals |= {"a loop by hand": partial(bare.build, task), "mlotool": partial(ours.build, task)}
    if task.algorithm == "fd" and not job.is_small:
        # A compiled module has no second derivatives.
        rivals["mlotool, compiled"] = partial(ours.build, task, is_compiled=True)
    return rivals


def _anew(build: Build) -> Callable[[], Cycle]:
    return lambda: build().cycle


def _kept(cycle: Cycle) -> Callable[[], Cycle]:
    return lambda: cycle


def _seconds_of_a_cycle(cycles: dict[str, Cycle]) -> float:
    found = interleave({name: _kept(cycle) for name, cycle in cycles.items()}, num_rounds=2, num_cycles=1)
    return max(statistics.median(each.wall for each in seconds) for seconds in found.values())
