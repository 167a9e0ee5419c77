"""Training by auxiliary variables: stages that run at the same time, bound by penalties and multipliers."""

from mlotool.layerparallel.auxiliary.auxiliary import Auxiliary

__all__ = ["Auxiliary"]
