"""What each of two ranks computes in tests/hypergradient/test_exactness_on_ranks.py."""

import os
from pathlib import Path

import torch
from torch import Tensor

from mlotool import Schedule
from mlotool.distributed.collectives import Ranks
from mlotool.runner.launcher import World, joined
from tests.hypergradient.unrolled_cases import BOTH, REMAT, UnrolledCase, parameters_of
from tests.over_ranks import over

# Two rows and one; two rows and one; one row and none.
SIZES = (3, 3, 1)


CASES = {
    "weighting": UnrolledCase("weighting", "momentum", sizes=SIZES, is_streamed=True),
    "start": UnrolledCase("maml", "adam", sizes=SIZES, is_streamed=True),
    "rate": UnrolledCase("lr", "adam", sizes=SIZES, is_streamed=True),
    "clipping": UnrolledCase("weighting", "sgd", sizes=SIZES, is_streamed=True, clip=0.05),
}


def compute(ranks: Ranks) -> dict[str, Tensor]:
    """Return how far an upper step of rate 1 goes, after three steps below it."""
    found = {}
    for name, case in CASES.items():
        for kind, algorithm in BOTH.items():
            for again, remat in REMAT.items() if name == "weighting" else [("remat", REMAT["remat"])]:
                made = over(ranks, case.program(algorithm, remat))
                before, schedule = parameters_of(made.problems["upper"]), Schedule(made)
                for _ in SIZES:
                    schedule.tick()
                found[f"{name} {kind} {again}"] = before - parameters_of(made.problems["upper"])
    return found


def main(folder: Path) -> None:
    """Be one of the ranks."""
    torch.set_num_threads(1)
    with joined(World.find(os.environ), torch.device("cpu")) as ranks:
        torch.save(compute(ranks), folder / f"rank_{ranks.rank}.pt")
