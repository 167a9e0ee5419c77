"""Spaces of models: a base, what may be changed in it, and decisions that make one model of it."""

from mlotool.core.errors import InfeasibleModelError
from mlotool.spaces.changes import Change
from mlotool.spaces.decisions import Decision, Decisions, choose, deciding
from mlotool.spaces.model_graph import ModelGraph
from mlotool.spaces.mutators.input import Input
from mlotool.spaces.mutators.insert import Insert
from mlotool.spaces.mutators.mutator import AbstractMutator
from mlotool.spaces.mutators.operator import Operator
from mlotool.spaces.mutators.repeat import Repeat
from mlotool.spaces.predicates import HasSetting, KeepsShape
from mlotool.spaces.space import Space
from mlotool.spaces.summary import NodeSummary
from mlotool.spaces.targets import Place, Target

__all__ = [
    "AbstractMutator",
    "Change",
    "Decision",
    "Decisions",
    "HasSetting",
    "InfeasibleModelError",
    "Input",
    "Insert",
    "KeepsShape",
    "ModelGraph",
    "NodeSummary",
    "Operator",
    "Place",
    "Repeat",
    "Space",
    "Target",
    "choose",
    "deciding",
]
