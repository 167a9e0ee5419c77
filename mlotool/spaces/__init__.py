"""Spaces of models: a base, what may be changed in it, and decisions that make one model of it."""

from mlotool.core.errors import InfeasibleModelError
from mlotool.spaces.changes import Change
from mlotool.spaces.decisions import Decision, Decisions, choose, deciding
from mlotool.spaces.model_graph import ModelGraph
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
from mlotool.spaces.predicates import HasSetting, KeepsShape
from mlotool.spaces.space import Space
from mlotool.spaces.summary import NodeSummary
from mlotool.spaces.targets import Place, Target

__all__ = [
    "AbstractMutator",
    "Branch",
    "Cell",
    "Change",
    "Decision",
    "Decisions",
    "Grow",
    "HasSetting",
    "InfeasibleModelError",
    "Input",
    "Insert",
    "KeepsShape",
    "Link",
    "ModelGraph",
    "NodeSummary",
    "Operator",
    "Place",
    "Repeat",
    "Space",
    "Split",
    "Target",
    "choose",
    "deciding",
]
