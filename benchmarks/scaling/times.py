"""Time of a cycle on one rank and on two, at the same global batch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.rounds import Cycle, Seconds, interleave, summarize
from benchmarks.harness.team import Team
from benchmarks.scaling.programs import LOWER, UPPER, Workload, num_parameters, program, schedule
from mlotool.distributed.collectives import Ranks

NUM_RANKS = 2
ONE, TWO_THREADS, HALF, TWO_RANKS = "1 rank, 1 thread", "1 rank, 2 threads", "1 rank, half the batch", "2 ranks"
CYCLE_SECONDS = {
    ("mlp", "finite_difference"): 3e-3,
    ("mlp", "neumann"): 5e-3,
    ("mlp", "cg"): 5e-3,
    ("resnet", "finite_difference"): 0.04,
    ("resnet", "neumann"): 0.15,
    ("resnet", "cg"): 0.15,
}
"""About what a cycle takes on one thread."""
CHECKED_CYCLES, LARGEST_DIFFERENCE = 3, 1e-8


def compare(team: Team, workload: Workload, num_rounds: int, block_seconds: float) -> dict[str, Any]:
    """Return the row of one workload; ends the program where two ranks compute something else than one.

    A rival's turn is a block of cycles to warm up and one that is timed: what the two ranks are told from here costs
    a message a block.
    """
    difference = _difference(team, workload)
    if difference > LARGEST_DIFFERENCE:
        raise SystemExit(
            f"{workload}: after {CHECKED_CYCLES} cycles in float64 the parameters of two ranks differ by {difference}, "
            f"relative to how far they moved; expected at most {LARGEST_DIFFERENCE}. No time is reported."
        )
    num_cycles = max(2, round(block_seconds / CYCLE_SECONDS[workload.model, workload.algorithm]))
    rank_seconds: list[float] = []
    rivals = {
        ONE: _alone(workload, num_cycles, num_threads=1),
        TWO_THREADS: _alone(workload, num_cycles, num_threads=2),
        HALF: _alone(workload, num_cycles, num_threads=1, is_halved=True),
        TWO_RANKS: team.rival(one_cycle, workload, num_cycles=num_cycles, rank_seconds=rank_seconds),
    }
    try:
        blocks = interleave(rivals, num_rounds=num_rounds, num_cycles=1, num_warmup=1)
    finally:
        torch.set_num_threads(1)
    found = {
        name: [Seconds(each.wall / num_cycles, each.cpu / num_cycles) for each in seconds]
        for name, seconds in blocks.items()
    }
    # This process only waits for the ranks. A turn has two blocks, the second of them timed.
    cpu = [seconds / num_cycles for seconds in rank_seconds[1::2]]
    found[TWO_RANKS] = [Seconds(each.wall, own) for each, own in zip(found[TWO_RANKS], cpu, strict=True)]
    return {
        "model": workload.model,
        "num_parameters": num_parameters(program(workload)),
        "algorithm": workload.algorithm,
        "num_rounds": num_rounds,
        "num_cycles": num_cycles,
        "wall": summarize(found, ONE, "wall"),
        "cpu": summarize(found, ONE, "cpu"),
        "difference": difference,
    }


def one_cycle(ranks: Ranks, workload: Workload) -> Callable[[], object]:
    """Return the cycle of one of the ranks."""
    return schedule(workload, ranks).tick


def trained(ranks: Ranks, workload: Workload, num_cycles: int) -> list[Tensor]:
    """Return the parameters of each problem as one vector."""
    made = schedule(workload, ranks)
    for _ in range(num_cycles):
        made.tick()
    problems = made.program.problems
    return [torch.cat([each.detach().reshape(-1) for each in problems[name].theta.values()]) for name in (LOWER, UPPER)]


def _alone(workload: Workload, num_cycles: int, *, num_threads: int, is_halved: bool = False) -> Callable[[], Cycle]:
    def build() -> Cycle:
        torch.set_num_threads(num_threads)
        made = schedule(workload, Ranks())
        for problem in made.program.problems.values() if is_halved else ():
            problem.stream.divide(0, NUM_RANKS)

        def cycle() -> None:
            for _ in range(num_cycles):
                made.tick()

        return cycle

    return build


def _difference(team: Team, workload: Workload) -> float:
    """Return how far two ranks are from one after some cycles in float64, relative to how far it moved.

    The larger one of the two problems' distances, and of the two ranks.
    """
    exact = Workload(workload.model, workload.algorithm, torch.float64)
    origin, alone = trained(Ranks(), exact, 0), trained(Ranks(), exact, CHECKED_CYCLES)
    return max(
        float((mine - one).norm() / (one - begin).norm())
        for both in team(trained, exact, CHECKED_CYCLES)
        for mine, one, begin in zip(both, alone, origin, strict=True)
    )
