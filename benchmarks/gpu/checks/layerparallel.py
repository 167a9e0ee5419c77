"""Layer-parallel training on one GPU: batched multigrid against a serial pass as a CUDA graph, stages on streams."""

from functools import partial
from typing import Any

from benchmarks.gpu.check import Check, Job
from benchmarks.layerparallel import batched
from benchmarks.layerparallel.model import Workload


def run(job: Job) -> None:
    """A row for each depth of the network, and one for the streams."""
    for depth in (16,) if job.is_small else batched.NUM_LAYERS:
        job.row(f"{depth} layers", partial(_multigrid, job, depth), seconds=15.0)
    if job.device.type == "cuda":
        job.row("stages", partial(_streams, job), seconds=15.0)


def _multigrid(job: Job, depth: int) -> dict[str, Any]:
    # A gradient of the deepest network takes half a second where it is not captured.
    num_rounds, num_cycles = (3, 1) if job.is_small or depth > 1024 else (9, batched.NUM_CYCLES)
    found = batched.compare(job.device, depth, num_rounds, num_cycles)
    base = next(name for name, wall in found["wall"].items() if wall["ratio_min"] == wall["ratio_max"] == 1.0)
    return {
        "rivals": found["wall"],
        "base": base,
        "error of the gradient": found["error"],
        "not captured": found["not_captured"],
    }


def _streams(job: Job) -> dict[str, Any]:
    found = batched.compare_streams(job.device, Workload(), num_rounds=9)
    return {"rivals": found["wall"], "num_stages": found["num_stages"]}


CHECK = Check("Layer-parallel on one device", "speed", 35, 90.0, run)
