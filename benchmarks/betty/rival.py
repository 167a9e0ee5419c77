"""What a rival is."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from benchmarks.harness.rounds import Cycle


def _nothing() -> None:
    """Do nothing: the program's parameters are those of the modules."""


@dataclass(frozen=True)
class Rival:
    """One program under test, ready to run.

    Args:
        cycle: takes one lower and one upper step.
        classifier: the lower model.
        weight_net: the upper model.
        restart: brings it back to its start; None where it is quick to build anew, which does the same.
        write_back: gives both modules the parameters and buffers of a program that keeps them elsewhere.
    """

    cycle: Cycle
    classifier: nn.Module
    weight_net: nn.Module
    restart: Callable[[], None] | None = None
    write_back: Callable[[], None] = _nothing
