"""Who is compared: serial training, data parallelism, pipelines and mlotool's methods, a row of the table each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.layerparallel import auxiliary, data_parallel, pipeline
from benchmarks.layerparallel.auxiliary import METHODS
from benchmarks.layerparallel.workload import AbstractWorkload

ONE_THREAD, DATA_PARALLEL = "serial, 1 thread", "data parallel"
NUM_MICRO_BATCHES = (4, 8)


@dataclass(frozen=True)
class Rival:
    """What trains on ranks of one thread each.

    Args:
        build: `build(ranks, workload, *settings)` returns a rank's cycle.
        settings: of `build`.
        check: `check(num_ranks, workload, *settings)` raises ValueError where the workload does not fit.
        is_serial: whether it computes the gradients of serial training.
        has_memory: whether a sample that comes for the first time costs more.
    """

    build: Callable[..., Callable[[], Any]]
    settings: tuple[Any, ...]
    check: Callable[..., object]
    is_serial: bool
    has_memory: bool = False


def all_threads(num_ranks: int) -> str:
    """Return the name of serial training with as many threads as there are ranks."""
    return f"serial, {num_ranks} threads"


def on_ranks(num_ranks: int) -> dict[str, Rival]:
    """Return the rivals that run on ranks, by the name of their row."""
    found = {DATA_PARALLEL: Rival(data_parallel.build, (), data_parallel.check, is_serial=True)}
    for kind in pipeline.KINDS:
        for number in NUM_MICRO_BATCHES:
            rival = Rival(pipeline.build, (kind, number), pipeline.check, is_serial=True)
            found[f"{kind}, {number} micro-batches"] = rival
    for method in METHODS:
        has_memory = METHODS[method]["variables"] == "stored"
        found[method] = Rival(auxiliary.build, (method, num_ranks), _cut, is_serial=False, has_memory=has_memory)
    return found


def _cut(num_ranks: int, workload: AbstractWorkload, method: str, num_stages: int) -> None:
    workload.make_cut(num_stages)
