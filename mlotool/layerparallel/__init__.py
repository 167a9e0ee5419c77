"""Layer-parallel training: multigrid across layers, auxiliary variables; plain torch."""

from importlib import import_module
from typing import Any

__all__ = ["Auxiliary", "BatchedStep", "BlockLayers", "Multigrid", "MultigridResidual", "StackedLayers"]
__all__ += ["critical_path", "mgrit", "mgrit_adjoint"]


def __getattr__(name: str) -> Any:
    # Lazy (PEP 562): a report asks for the speed-up model, and must not import torch.
    if name in __all__:
        home = "auxiliary" if name == "Auxiliary" else "multigrid"
        return getattr(import_module(f"mlotool.layerparallel.{home}"), name)
    raise AttributeError(f"module 'mlotool.layerparallel' has no attribute '{name}'")
