"""Multigrid across the layers of a residual network (Günther et al. 2020, arXiv 1812.04352)."""

from mlotool.layerparallel.multigrid.guard import Guard
from mlotool.layerparallel.multigrid.layers import BatchedStep, BlockLayers, StackedLayers, WholeLayers
from mlotool.layerparallel.multigrid.residual import MultigridResidual
from mlotool.layerparallel.multigrid.setting import Multigrid
from mlotool.layerparallel.multigrid.solver import CriticalPath, critical_path, mgrit, mgrit_adjoint

__all__ = ["BatchedStep", "BlockLayers", "CriticalPath", "Guard", "Multigrid", "MultigridResidual", "StackedLayers"]
__all__ += ["WholeLayers", "critical_path", "mgrit", "mgrit_adjoint"]
