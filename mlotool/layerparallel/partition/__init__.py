"""A module as a chain of stages, each of which goes on where the one before has stopped."""

from mlotool.layerparallel.partition.chain import Chain, partition
from mlotool.layerparallel.partition.trace import Inputs, Stage

__all__ = ["Chain", "Inputs", "Stage", "partition"]
