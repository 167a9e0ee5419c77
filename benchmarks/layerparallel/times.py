"""Time of a training batch: serial with one thread and with several, and ranks of one thread each."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from benchmarks.harness.rounds import Cycle, Seconds, interleave, summarize
from benchmarks.harness.team import Team
from benchmarks.layerparallel import auxiliary, checks, serial
from benchmarks.layerparallel.balance import balance, exchanged
from benchmarks.layerparallel.rivals import DATA_PARALLEL, ONE_THREAD, Rival, all_threads, on_ranks
from benchmarks.layerparallel.workload import AbstractWorkload
from mlotool.layerparallel.speedup import predicted_speedup

Found = Mapping[str, list[Seconds]]

NUM_WARMUP = 2
"""Batches, but all of them where a sample's first visit costs more than the next ones."""


def compare(team: Team, workload: AbstractWorkload, num_rounds: int) -> dict[str, Any]:
    """Return the times of all rivals; one that cannot run, or computes something else than it should, is not timed."""
    rivals = on_ranks(team.num_ranks)
    differences, not_run = checks.differences(team, workload, rivals)
    found = _timed(team, workload, {name: rivals[name] for name in rivals if name not in not_run}, num_rounds)
    wall = summarize(found, ONE_THREAD, "wall")
    methods = [name for name, rival in rivals.items() if not rival.is_serial and name in found]
    return {
        "workload": {"class": type(workload).__name__, **vars(workload), "dtype": str(workload.dtype)},
        "num_ranks": team.num_ranks,
        "num_rounds": num_rounds,
        "wall": wall,
        "wall_over_all_threads": summarize(found, all_threads(team.num_ranks), "wall"),
        "wall_over_data_parallel": summarize(found, DATA_PARALLEL, "wall") if DATA_PARALLEL in found else {},
        "cpu_time": summarize(found, ONE_THREAD, "cpu"),
        "difference": differences,
        "checked_with": checks.NORMALISES if checks.has_batch_norm(workload) else "",
        "not_run": not_run,
        "balance": balance(workload, team.num_ranks),
        "exchanged": exchanged(workload, team.num_ranks),
        "model_of_speedup": {
            name: {**parts(workload, name, team.num_ranks), "measured": 1 / wall[name]["ratio"]} for name in methods
        },
    }


def parts(workload: AbstractWorkload, method: str, num_stages: int) -> dict[str, float]:
    """Return the seconds of a batch's parts, the stages one after the other on one thread, and equation 27 of them."""
    seconds = auxiliary.parts(workload, method, num_stages)
    return {
        "forward": seconds.forward,
        "backward": seconds.backward,
        "auxiliary": seconds.auxiliary,
        "predicted": predicted_speedup(seconds, num_stages),
        "bound": seconds.bound,
    }


def _timed(team: Team, workload: AbstractWorkload, on_team: Mapping[str, Rival], num_rounds: int) -> Found:
    """Return the seconds of a batch of each rival in each round; a rival's turn is a cycle through all batches."""
    count = workload.num_batches
    rank_seconds: dict[str, list[float]] = {name: [] for name in on_team}
    rivals: dict[str, Callable[[], Cycle]] = {
        ONE_THREAD: _alone(workload, num_threads=1),
        all_threads(team.num_ranks): _alone(workload, num_threads=team.num_ranks),
    }
    for name, rival in on_team.items():
        rivals[name] = team.rival(
            rival.build,
            workload,
            *rival.settings,
            num_cycles=count,
            rank_seconds=rank_seconds[name],
            num_warmup=count if rival.has_memory else NUM_WARMUP,
        )
    try:
        turns = interleave(rivals, num_rounds=num_rounds, num_cycles=1, num_warmup=0)
    finally:
        torch.set_num_threads(1)
    return {name: _of_a_batch(seconds, count, rank_seconds.get(name)) for name, seconds in turns.items()}


def _alone(workload: AbstractWorkload, num_threads: int) -> Callable[[], Cycle]:
    def start() -> Cycle:
        batch = serial.build(workload, num_threads)
        for _ in range(NUM_WARMUP):
            batch()

        def cycle() -> None:
            for _ in range(workload.num_batches):
                batch()

        return cycle

    return start


def _of_a_batch(seconds: Sequence[Seconds], count: int, rank_seconds: Sequence[float] | None) -> list[Seconds]:
    # This process only waits for the ranks, and has no CPU time of theirs.
    cpu = [each.cpu for each in seconds] if rank_seconds is None else rank_seconds
    return [Seconds(each.wall / count, own / count) for each, own in zip(seconds, cpu, strict=True)]
