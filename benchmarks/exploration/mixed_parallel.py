"""Mini-batches a second of a space that is trained as one network, on two ranks that run different paths.

    python -m benchmarks.exploration.mixed_parallel

The space of `shared_weights`, paths drawn uniformly, one thread a process. Mixed parallelism: each of two gloo ranks
runs a path of its own on a batch of its own, and gradients are averaged over the ranks that used a parameter. Beside it
stand one rank; two processes that tell each other nothing, the most that the machine gives; and data parallelism, two
ranks that divide the batch of one path. A mini-batch is a batch of one path, however many ranks share it. Wall times
of rounds in which the ways take turns, with the CPU time of the busier process beside them.
"""

import argparse
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor

from benchmarks.exploration.shared_weights import BATCH_SIZES, SGD, Samples, loss, shared
from benchmarks.harness import record
from benchmarks.harness.rounds import Seconds, interleave
from benchmarks.harness.team import Team
from mlotool.distributed.collectives import Ranks
from mlotool.program import Graph, Problem, Program, Schedule, Stream
from mlotool.runner.distributed import distribute
from mlotool.spaces import AbstractPaths, SharedDecision, path_of

NUM_RANKS = 2
ONE, MIXED, APART, DATA = "one rank", "mixed, two ranks", "two processes apart", "data parallel, two ranks"
PATHS_A_TICK = {ONE: 1, MIXED: NUM_RANKS, APART: NUM_RANKS, DATA: 1}
RATIOS = {
    "mixed / one": (MIXED, ONE),
    "apart / one": (APART, ONE),
    "mixed / apart": (MIXED, APART),
    "mixed / data parallel": (MIXED, DATA),
}
CHECKED_TICKS = 4


class EqualPaths(AbstractPaths):
    """Draws paths uniformly from a generator of its own, and so the same ones on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(0)

    def forward(self, decisions: Sequence[SharedDecision]) -> dict[str, Any]:
        """Return a path."""
        return path_of(decisions, lambda each: each.candidates[self._number(len(each.candidates))])

    def _number(self, count: int) -> int:
        return int(torch.randint(count, (), generator=self._generator))


def schedule(ranks: Ranks, way: str, batch_size: int) -> Schedule:
    """Return what trains the space on one of the ranks.

    Args:
        ranks: both; `ONE` and `APART` do not use them.
        way: one of the four.
        batch_size: of a path; mixed parallelism divides a batch of twice that size.
    """
    warnings.simplefilter("ignore")
    ranks = ranks if way in (MIXED, DATA) else Ranks()
    torch.manual_seed(0)
    module = shared(EqualPaths() if way == DATA else None)
    stream = Stream(Samples(), batch_size * (ranks.size if way == MIXED else 1), seed=0)
    problem = Problem("net", module, loss, roles={"model": "net"}, stream=stream, optimizer=SGD)
    made = Program([problem], Graph(), ranks.reduce)
    distribute(made, ranks, seed=0)
    return Schedule(made)


def one_tick(ranks: Ranks, way: str, batch_size: int) -> Callable[[], object]:
    """Return the tick of one of the ranks."""
    return schedule(ranks, way, batch_size).tick


def seconds_of_tick(ranks: Ranks, batch_size: int) -> float:
    """Return about what a tick takes alone."""
    tick = one_tick(ranks, ONE, batch_size)
    tick()
    began = time.perf_counter()
    for _ in range(5):
        tick()
    return (time.perf_counter() - began) / 5


def trained(ranks: Ranks, way: str) -> tuple[Tensor, Tensor]:
    """Return the parameters after some ticks, and how often each candidate was computed."""
    made = schedule(ranks, way, BATCH_SIZES[0])
    for _ in range(CHECKED_TICKS):
        made.tick()
    problem = made.program.problems["net"]
    return torch.cat([each.detach().reshape(-1) for each in problem.theta.values()]), problem.module.counts.clone()


def check(team: Team) -> None:
    """End the program where ranks do other work than their way's."""
    for way in (MIXED, DATA):
        (first, first_counts), (second, second_counts) = team(trained, way)
        if not torch.equal(first, second):
            raise SystemExit(f"{way}: the ranks' parameters differ after {CHECKED_TICKS} ticks. No time is reported.")
        if torch.equal(first_counts, second_counts) != (way == DATA):
            raise SystemExit(f"{way}: the ranks ran the same paths, or should have. No time is reported.")


def measured(team: Team, batch_size: int, num_rounds: int, num_ticks: int) -> dict[str, Any]:
    """Return the row of a size of batches."""
    rank_seconds: dict[str, list[float]] = {way: [] for way in PATHS_A_TICK}
    rivals: dict[str, Any] = {ONE: lambda: _alone(batch_size, num_ticks, rank_seconds[ONE])}
    for way in (MIXED, APART, DATA):
        rivals[way] = team.rival(one_tick, way, batch_size, num_cycles=num_ticks, rank_seconds=rank_seconds[way])
    found = interleave(rivals, num_rounds=num_rounds, num_cycles=1, num_warmup=1)
    row: dict[str, Any] = {"batch_size": batch_size, "num_ticks": num_ticks, "num_rounds": num_rounds}
    rates = {way: _rates(way, found[way], num_ticks) for way in PATHS_A_TICK}
    # A turn has two blocks, the second of them timed.
    cpu = {way: [1000 * each / num_ticks / PATHS_A_TICK[way] for each in rank_seconds[way][1::2]] for way in rates}
    row["mini-batches a second"] = {way: _spread(each) for way, each in rates.items()}
    row["CPU ms of the busier process, a mini-batch"] = {way: _spread(each) for way, each in cpu.items()}
    for name, (mine, other) in RATIOS.items():
        row[name] = _spread([a / b for a, b in zip(rates[mine], rates[other], strict=True)])
        row[f"{name}, by CPU"] = _spread([b / a for a, b in zip(cpu[mine], cpu[other], strict=True)])
    return row


def _alone(batch_size: int, num_ticks: int, seconds: list[float]) -> Callable[[], None]:
    tick = one_tick(Ranks(), ONE, batch_size)

    def block() -> None:
        began = time.process_time()
        for _ in range(num_ticks):
            tick()
        seconds.append(time.process_time() - began)

    return block


def _rates(way: str, blocks: list[Seconds], num_ticks: int) -> list[float]:
    return [PATHS_A_TICK[way] * num_ticks / each.wall for each in blocks]


def _spread(values: list[float]) -> dict[str, float]:
    low, _, high = quantiles(values, n=4)
    every = {"median": median(values), "quartile_1": low, "quartile_3": high, "min": min(values), "max": max(values)}
    return {name: round(value, 4) for name, value in every.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCH_SIZES, help="sizes of batches")
    parser.add_argument("--block-seconds", type=float, default=1.0, help="about how long one rank's timed block takes")
    parser.add_argument(
        "--output", type=Path, help="JSON file; default: benchmarks/results/exploration_mixed_parallel.json"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    where = record.surroundings(("torch",))
    rows = []
    with Team(NUM_RANKS) as team:
        check(team)
        for batch_size in arguments.batches:
            num_ticks = max(2, round(arguments.block_seconds / seconds_of_tick(Ranks(), batch_size)))
            rows.append(measured(team, batch_size, arguments.rounds, num_ticks))
            show(rows[-1])
    print(f"written to {record.write('exploration_mixed_parallel', {**where, 'rows': rows}, arguments.output)}")


def show(row: dict[str, Any]) -> None:
    """Print a row."""
    rates = ", ".join(f"{way} {each['median']:.1f}" for way, each in row["mini-batches a second"].items())
    print(f"batches of {row['batch_size']}: mini-batches a second: {rates}", flush=True)
    for name, found in row.items():
        if " / " in name:
            print(f"  {name} {found['median']:.2f} ({found['quartile_1']:.2f}-{found['quartile_3']:.2f})", flush=True)


if __name__ == "__main__":
    main()
