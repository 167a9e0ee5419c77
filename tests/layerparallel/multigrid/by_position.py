"""`mgrit` and `mgrit_adjoint` with the fields of their method by position, in the order of `Method`."""

from dataclasses import fields
from typing import Any

from torch import Tensor

from mlotool import layerparallel
from mlotool.layerparallel.multigrid.settings import Method

KEYS = [each.name for each in fields(Method)]
Solved = tuple[Tensor, list[float]]


def mgrit(step: Any, u0: Any, num_layers: int, h: float, *method: Any, **more: Any) -> Solved:
    return layerparallel.mgrit(step, u0, num_layers, h, **dict(zip(KEYS, method, strict=False)), **more)


def mgrit_adjoint(
    step: Any, states: Any, cotangent: Any, num_layers: int, h: float, *method: Any, **more: Any
) -> Solved:
    found = dict(zip(KEYS, method, strict=False))
    return layerparallel.mgrit_adjoint(step, states, cotangent, num_layers, h, **found, **more)
