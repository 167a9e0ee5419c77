"""Layer-parallel training: multigrid across layers, auxiliary variables; plain torch."""

from mlotool.layerparallel.multigrid import (
    BatchedStep,
    BlockLayers,
    Multigrid,
    MultigridResidual,
    StackedLayers,
    critical_path,
    mgrit,
    mgrit_adjoint,
)

__all__ = [
    "BatchedStep",
    "BlockLayers",
    "Multigrid",
    "MultigridResidual",
    "StackedLayers",
    "critical_path",
    "mgrit",
    "mgrit_adjoint",
]
