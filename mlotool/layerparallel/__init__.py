"""Layer-parallel training: multigrid across layers, auxiliary variables; plain torch."""

from mlotool.layerparallel.multigrid import BatchedStep, critical_path, mgrit, mgrit_adjoint

__all__ = ["BatchedStep", "critical_path", "mgrit", "mgrit_adjoint"]
