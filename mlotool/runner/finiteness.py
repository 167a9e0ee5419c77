"""Whether a program's parameters are still numbers."""

import math

import torch

from mlotool.core.errors import NonFiniteParametersError
from mlotool.program import Program


def check_parameters(program: Program, tick: int) -> None:
    """Raise NonFiniteParametersError where theta of a problem has a NaN or an infinity.

    A loss does not show it: it is computed before the step, and the gradient of a finite loss may be NaN.

    Args:
        program: the problems.
        tick: the last one done, for the message.

    Cost: a pass over the parameters and a transfer from the device a problem; for a round, not for a tick.
    """
    for name, problem in program.problems.items():
        # An empty tensor has no largest magnitude.
        theta = [tensor for tensor in problem.constants().values() if tensor.numel()]
        if not theta:
            continue
        # The largest magnitude: a sum of squares overflows where every number is finite.
        largest = torch.stack(torch._foreach_norm(theta, math.inf))
        if not bool(largest.isfinite().all()):
            raise NonFiniteParametersError(name, tick)
