"""Spaces of models (architecture search): a base model, what may change in it, and decisions between its variants."""

from typing import TYPE_CHECKING, Any

from mlotool.core.errors import InfeasibleModelError
from mlotool.core.settings import discover
from mlotool.spaces.decisions import Decision, Decisions, choose, deciding
from mlotool.spaces.model_graph import Change, ModelGraph
from mlotool.spaces.mutators.mutator import AbstractMutator
from mlotool.spaces.places import Place, Target
from mlotool.spaces.shared.shared_graph import AbstractPaths, Mixture, SharedDecision, path_of
from mlotool.spaces.shared.shared_space import AbstractArchitecture, SharedSpace
from mlotool.spaces.space import Space
from mlotool.spaces.summary import NodeSummary

_targets = discover(__name__, "mutators", "shared")
globals().update(_targets)
__all__ = ["AbstractArchitecture", "AbstractMutator", "AbstractPaths", "Change", "Decision", "Decisions", "Mixture"]
__all__ += ["InfeasibleModelError", "ModelGraph", "NodeSummary", "Place", "SharedDecision", "SharedSpace", "Space"]
__all__ += ["Target", "choose", "deciding", "path_of"]
__all__ += [name for name in _targets if name not in __all__]

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
