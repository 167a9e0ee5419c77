"""What a rival is."""

from dataclasses import dataclass

from torch import nn

from benchmarks.harness.rounds import Cycle


@dataclass(frozen=True)
class Rival:
    """One program under test, ready to run.

    Args:
        cycle: takes one lower and one upper step.
        classifier: the lower model.
        weight_net: the upper model.
    """

    cycle: Cycle
    classifier: nn.Module
    weight_net: nn.Module
