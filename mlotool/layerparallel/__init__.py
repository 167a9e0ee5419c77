"""Layer-parallel training: multigrid across layers, auxiliary variables; plain torch."""

from mlotool.layerparallel.multigrid import (
    BatchedStep,
    BlockLayers,
    MultigridResidual,
    StackedLayers,
    critical_path,
    mgrit,
    mgrit_adjoint,
)

__all__ = [
    "BatchedStep",
    "BlockLayers",
    "MultigridResidual",
    "StackedLayers",
    "critical_path",
    "mgrit",
    "mgrit_adjoint",
]
