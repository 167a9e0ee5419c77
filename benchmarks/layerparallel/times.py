"""Time of a training batch: serial with one thread and with two, and two ranks of one thread each."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.pair import Pair
from benchmarks.harness.rounds import Cycle, Seconds, interleave, summarize
from benchmarks.layerparallel import pipeline, serial
from benchmarks.layerparallel.model import Workload
from mlotool.runner.ranks import Ranks

ONE_THREAD, TWO_THREADS = "serial, 1 thread", "serial, 2 threads"
NUM_MICRO_BATCHES = (4, 8)
NUM_BATCHES = 2
"""In a rival's turn, once to warm up and once timed."""
LARGEST_DIFFERENCE = 1e-5
"""In float64: in float32 a ReLU that switches moves the second step's gradient by 2e-4."""


def compare(pair: Pair, workload: Workload, num_rounds: int) -> dict[str, Any]:
    """Return the times of all rivals; ends the program where one computes something else than it should."""
    pipelines = {
        f"{schedule}, {number} micro-batches": (schedule, number)
        for schedule in pipeline.SCHEDULES
        for number in NUM_MICRO_BATCHES
    }
    exact = replace(workload, dtype=torch.float64)
    expected = gradients(serial.build(exact, num_threads=1))
    differences = {
        name: check(name, _joined(pair(pipeline_gradients, exact, *settings)), expected)
        for name, settings in pipelines.items()
    }
    rank_seconds: dict[str, list[float]] = {name: [] for name in pipelines}
    rivals: dict[str, Callable[[], Cycle]] = {
        ONE_THREAD: _alone(workload, num_threads=1),
        TWO_THREADS: _alone(workload, num_threads=2),
    }
    for name, settings in pipelines.items():
        rivals[name] = pair.rival(
            pipeline.build, workload, *settings, num_cycles=NUM_BATCHES, rank_seconds=rank_seconds[name]
        )
    try:
        turns = interleave(rivals, num_rounds=num_rounds, num_cycles=1, num_warmup=1)
    finally:
        torch.set_num_threads(1)
    found = {name: _of_a_batch(seconds, rank_seconds.get(name)) for name, seconds in turns.items()}
    return {
        "num_rounds": num_rounds,
        "num_batches": NUM_BATCHES,
        "wall": summarize(found, ONE_THREAD, "wall"),
        "cpu": summarize(found, ONE_THREAD, "cpu"),
        "difference": differences,
    }


def gradients(cycle: Callable[[], Sequence[Tensor]]) -> list[Tensor]:
    """Return the gradient at each of NUM_BATCHES steps, as vectors."""
    return [torch.cat([each.detach().reshape(-1).clone() for each in cycle()]) for _ in range(NUM_BATCHES)]


def pipeline_gradients(ranks: Ranks, workload: Workload, schedule: str, num_micro_batches: int) -> list[Tensor]:
    """Return those of a rank's stage."""
    return gradients(pipeline.build(ranks, workload, schedule, num_micro_batches))


def check(name: str, found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest relative difference, and end the program where it is too large."""
    pairs = zip(found, expected, strict=True)
    difference = max(float((mine - one).norm() / one.norm()) for mine, one in pairs)
    if not difference <= LARGEST_DIFFERENCE:
        raise SystemExit(
            f"{name}: found a relative difference of {difference:.1e}; expected at most {LARGEST_DIFFERENCE}. "
            "No time is reported: see what the rivals compute."
        )
    return difference


def _joined(by_rank: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [torch.cat(parts) for parts in zip(*by_rank, strict=True)]


def _alone(workload: Workload, num_threads: int) -> Callable[[], Cycle]:
    def start() -> Cycle:
        batch = serial.build(workload, num_threads)

        def cycle() -> None:
            for _ in range(NUM_BATCHES):
                batch()

        return cycle

    return start


def _of_a_batch(seconds: Sequence[Seconds], rank_seconds: Sequence[float] | None) -> list[Seconds]:
    if rank_seconds is None:
        return [Seconds(each.wall / NUM_BATCHES, each.cpu / NUM_BATCHES) for each in seconds]
    # This process only waits for the ranks. A turn has two cycles, the second of them timed.
    own = rank_seconds[1::2]
    return [Seconds(each.wall / NUM_BATCHES, cpu / NUM_BATCHES) for each, cpu in zip(seconds, own, strict=True)]
