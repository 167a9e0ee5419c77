"""A program of one process on the ranks of a run."""

from mlotool.distributed.collectives import Ranks
from mlotool.program import Program
from mlotool.runner.distributed import distribute


def over(ranks: Ranks, made: Program, seed: int = 0) -> Program:
    """Return a program with the mean over ranks, divided among them."""
    shared = Program(made.problems.values(), made.graph, ranks.reduce)
    distribute(shared, ranks, seed)
    return shared
