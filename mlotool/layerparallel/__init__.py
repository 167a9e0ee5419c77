"""Layer-parallel training: multigrid across layers, auxiliary variables; plain torch."""

from mlotool.layerparallel.auxiliary import Auxiliary

__all__ = ["Auxiliary"]
