"""Time of a training batch: serial with one thread and with two, and two ranks of one thread each."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.pair import NUM_RANKS, Pair
from benchmarks.harness.rounds import Cycle, Seconds, interleave, summarize
from benchmarks.layerparallel import auxiliary, pipeline, serial
from benchmarks.layerparallel.model import NUM_BATCHES, Workload
from mlotool.distributed.collectives import Ranks
from mlotool.layerparallel.speedup import predicted_speedup

ONE_THREAD, TWO_THREADS = "serial, 1 thread", "serial, 2 threads"
PIPELINES: dict[str, tuple[Any, ...]] = {
    f"{schedule}, {number} micro-batches": (pipeline.build, schedule, number)
    for schedule in pipeline.SCHEDULES
    for number in (4, 8)
}
OURS: dict[str, tuple[Any, ...]] = {
    "stored variables": (auxiliary.build, "stored"),
    "AuxNet": (auxiliary.build, "auxnet"),
    "ReAuxNet": (auxiliary.build, "recursive"),
}
CHECKED_BATCH_SIZE, LARGEST_DIFFERENCE = 16, 1e-5
"""In float64: in float32 a ReLU that switches moves the second step's gradient by 2e-4."""


def compare(pair: Pair, workload: Workload, num_rounds: int) -> dict[str, Any]:
    """Return the times of all rivals; ends the program where one computes something else than it should."""
    exact = replace(workload, dtype=torch.float64, batch_size=CHECKED_BATCH_SIZE)
    expected = gradients(serial.build(exact, num_threads=1))
    differences = {
        name: check(name, _joined(pair(pipeline_gradients, exact, *settings)), expected)
        for name, (_, *settings) in PIPELINES.items()
    }
    for name, (_, variables) in OURS.items():
        here = auxiliary.trained(Ranks(), exact, variables)
        differences[name] = max(check(name, each, here) for each in pair(auxiliary.trained, exact, variables))
    on_ranks = {**PIPELINES, **OURS}
    rank_seconds: dict[str, list[float]] = {name: [] for name in on_ranks}
    rivals: dict[str, Callable[[], Cycle]] = {
        ONE_THREAD: _alone(workload, num_threads=1),
        TWO_THREADS: _alone(workload, num_threads=2),
    }
    for name, (build, *settings) in on_ranks.items():
        rivals[name] = pair.rival(build, workload, *settings, num_cycles=NUM_BATCHES, rank_seconds=rank_seconds[name])
    try:
        turns = interleave(rivals, num_rounds=num_rounds, num_cycles=1, num_warmup=1)
    finally:
        torch.set_num_threads(1)
    found = {name: _of_a_batch(seconds, rank_seconds.get(name)) for name, seconds in turns.items()}
    wall = summarize(found, ONE_THREAD, "wall")
    return {
        "workload": {**vars(workload), "dtype": str(workload.dtype)},
        "num_rounds": num_rounds,
        "num_batches": NUM_BATCHES,
        "wall": wall,
        "wall_over_two_threads": summarize(found, TWO_THREADS, "wall"),
        "cpu_time": summarize(found, ONE_THREAD, "cpu"),
        "difference": differences,
        "model_of_speedup": {
            name: {**parts(workload, variables), "measured": 1 / wall[name]["ratio"]}
            for name, (_, variables) in OURS.items()
        },
    }


def parts(workload: Workload, variables: str) -> dict[str, float]:
    """Return the seconds of a batch's parts, the stages one after the other on one thread, and equation 27 of them."""
    seconds = auxiliary.parts(workload, variables)
    return {
        "forward": seconds.forward,
        "backward": seconds.backward,
        "auxiliary": seconds.auxiliary,
        "predicted": predicted_speedup(seconds, NUM_RANKS),
        "bound": seconds.bound,
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
