"""Spaces of models: a base, what may be changed in it, and decisions that make one model of it."""

from mlotool.core.errors import InfeasibleModelError
from mlotool.core.settings import discover
from mlotool.spaces.decisions import Decision, Decisions, choose, deciding
from mlotool.spaces.model_graph import Change, ModelGraph
from mlotool.spaces.mutators.branch import Branch
from mlotool.spaces.mutators.cell import Cell
from mlotool.spaces.mutators.grow import Grow
from mlotool.spaces.mutators.input import Input
from mlotool.spaces.mutators.insert import Insert
from mlotool.spaces.mutators.link import Link
from mlotool.spaces.mutators.mutator import AbstractMutator
from mlotool.spaces.mutators.operator import Operator
from mlotool.spaces.mutators.repeat import Repeat
from mlotool.spaces.mutators.split import Split
from mlotool.spaces.places import HasSetting, KeepsShape, Place, Target
from mlotool.spaces.shared.architecture import AbstractArchitecture, BinaryPaths, PathPolicy, PathWeights
from mlotool.spaces.shared.paths import AbstractPaths, FairPaths, SharedDecision, UniformPaths, path_of
from mlotool.spaces.shared.shared_space import SharedSpace
from mlotool.spaces.shared.super_graph import Mixture
from mlotool.spaces.space import Space
from mlotool.spaces.summary import NodeSummary

_targets = discover(__name__, "mutators")
globals().update(_targets)
__all__ = [
    "AbstractArchitecture",
    "AbstractMutator",
    "AbstractPaths",
    "BinaryPaths",
    "Branch",
    "Cell",
    "Change",
    "Decision",
    "Decisions",
    "FairPaths",
    "Grow",
    "HasSetting",
    "InfeasibleModelError",
    "Input",
    "Insert",
    "KeepsShape",
    "Link",
    "Mixture",
    "ModelGraph",
    "NodeSummary",
    "Operator",
    "PathPolicy",
    "PathWeights",
    "Place",
    "Repeat",
    "SharedDecision",
    "SharedSpace",
    "Space",
    "Split",
    "Target",
    "UniformPaths",
    "choose",
    "deciding",
    "path_of",
]
__all__ += [name for name in _targets if name not in __all__]
