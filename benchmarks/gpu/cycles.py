"""One cycle of Meta-Weight-Net on models of real size: a loop written by hand, Betty, mlotool."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.betty import bare, ours
from benchmarks.betty.rival import Rival
from benchmarks.betty.task import Task
from benchmarks.gpu.check import Check, Job
from benchmarks.harness import memory
from benchmarks.harness.rounds import Cycle, interleave, summarize
from mlotool.runner.process_settings import torch_settings

ALGORITHMS = ("fd", "neumann", "cg")
TRACES = ("eager", "inductor", "cuda_graph")
SECONDS_OF_A_TURN = 0.15
Build = Callable[[], Rival]


def check(title: str, model: str, order: int, seconds: float) -> Check:
    """Return the check of one model."""
    return Check(title, "speed", order, seconds, partial(_run, model=model))


def _run(job: Job, model: str) -> None:
    for precision in ("fp32", "bf16"):
        for algorithm in ALGORITHMS:
            task = Task(model, algorithm, job.device.type, precision=precision, is_small=job.is_small)
            job.row(f"{algorithm}, {precision}", partial(compared, job, task, rivals_of(job, task)), seconds=20.0)
            # By themselves, as inductor takes its time: against the plan of the same run.
            for trace in () if job.is_small else TRACES:
                title = f"{algorithm}, {precision}, trace: {trace}"
                seconds = 120.0 if trace == "inductor" else 30.0
                job.row(title, partial(compared, job, task, traced_rivals(task, trace)), seconds=seconds)
    # Last, for compiling takes long; with finite differences alone, as a compiled module has no second derivatives.
    for precision in () if job.is_small else ("fp32", "bf16"):
        task = Task(model, "fd", job.device.type, precision=precision)
        rivals: dict[str, Build] = {
            "a loop by hand": partial(bare.build, task),
            "a loop by hand, compiled": partial(bare.build, task, is_compiled=True),
            "mlotool, compiled": partial(ours.build, task, is_compiled=True),
        }
        job.row(f"fd, {precision}, compiled", partial(compared, job, task, rivals), seconds=60.0)


def rivals_of(job: Job, task: Task) -> dict[str, Build]:
    """Return who is compared; the ratios are to the first that works."""
    rivals: dict[str, Build] = {}
    # Betty's autocast is CUDA's alone.
    if job.betty is not None and not (job.is_small and task.precision != "fp32"):
        sys.path.insert(0, str(job.betty))
        from benchmarks.betty import peer

        rivals["Betty"] = partial(peer.build, task)
    return rivals | {"a loop by hand": partial(bare.build, task), "mlotool": partial(ours.build, task)}


def traced_rivals(task: Task, trace: str) -> dict[str, Build]:
    """Return mlotool by its plans, and with traced ticks."""
    return {"mlotool": partial(ours.build, task), f"mlotool, {trace}": partial(ours.build, task, trace=trace)}


def compared(job: Job, task: Task, rivals: dict[str, Build], *, is_timed: bool = True) -> dict[str, Any]:
    """Return times and peaks of all rivals; one that fails says so in its place.

    TF32 is off, as in a run; what is built is kept over all rounds, for a compiled module takes long to build.
    """
    found: dict[str, dict[str, Any]] = {}
    kept: dict[str, Rival] = {}
    with torch_settings(num_threads=None, deterministic=False, tf32=False):
        for name, build in rivals.items():
            try:
                peak = memory.peak_bytes(lambda build=build: build().cycle, on_cuda=not job.is_small)
                found[name] = {"peak_mib": peak / 2**20}
                if is_timed:
                    kept[name] = build()
            except TimeoutError:
                raise
            except Exception as error:
                found[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
        row: dict[str, Any] = {
            "num_parameters": sum(parameter.numel() for parameter in task.make_classifier().parameters()),
            "batch_size": task.batch_sizes[0],
            "rivals": found,
        }
        if kept:
            row |= _timed(job, kept, found)
        if kept and task.algorithm != "fd":
            row["solves of mlotool"] = dict(ours.solves(task, 3))
    wrong = [name for name, rival in kept.items() if not all(_is_finite(each) for each in _parameters(rival))]
    return row | ({"not finite in the end": ", ".join(wrong)} if wrong else {})


def _timed(job: Job, kept: dict[str, Rival], found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    cycles = {name: _built_once(rival.cycle) for name, rival in kept.items()}
    probe = interleave(cycles, num_rounds=2, num_cycles=1)
    slowest = max(min(each.wall for each in seconds) for seconds in probe.values())
    num_cycles = 1 if job.is_small else max(1, min(20, round(SECONDS_OF_A_TURN / slowest)))
    num_rounds = 3 if job.is_small else 15
    # The probe has warmed them up.
    seconds = interleave(cycles, num_rounds=num_rounds, num_cycles=num_cycles, num_warmup=0)
    base = next(iter(kept))
    for name, times in summarize(seconds, base, "wall").items():
        found[name] |= times
    return {"base": base, "num_rounds": num_rounds, "num_cycles": num_cycles}


def _built_once(cycle: Cycle) -> Callable[[], Cycle]:
    return lambda: cycle


def _parameters(rival: Rival) -> list[torch.Tensor]:
    return [*rival.classifier.parameters(), *rival.weight_net.parameters()]


def _is_finite(tensor: torch.Tensor) -> bool:
    return bool(tensor.isfinite().all())
