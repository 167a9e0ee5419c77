"""Whether a program's parameters are still numbers."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from mlotool.core.errors import ConfigError, NonFiniteParametersError
from mlotool.core.user_code import named
from mlotool.program import Problem, Program
from mlotool.runner.blame import advice, related
from mlotool.spaces.shared.shared_space import SharedSpace

MAX_NAMED = 8
"""Parameters that a message names."""


def check_parameters(program: Program, tick: int) -> None:
    """Raise NonFiniteParametersError where theta of a problem has a NaN or an infinity.

    A loss does not show it: it is computed before the step, and the gradient of a finite loss may be NaN.

    Args:
        program: the problems.
        tick: the last one done, for the message.

    Cost: a pass over the parameters and a transfer from the device a problem; for a round, not for a tick.
    """
    bad = []
    for name, problem in program.problems.items():
        is_finite = _are_finite(_local(tensor) for tensor in problem.constants().values())
        if problem.shards is not None:
            # Each rank sees its own part: all find what one of them has found.
            [share] = program.rank_mean.mean([torch.tensor(float(is_finite))])
            is_finite = share.item() == 1.0
        if not is_finite:
            bad.append(name)
    if bad:
        # What a gradient passes through, or is made with, may be at fault as well.
        suspects = [program.problems[name] for name in dict.fromkeys([*bad, *related(bad[0], program.problems)])]
        told = " ".join(filter(None, [_in_space(program.problems[bad[0]]), advice(suspects)]))
        raise NonFiniteParametersError(bad[0], tick, bad[1:], told)


def check_start(name: str, problem: Problem) -> None:
    """Refuse a module whose parameters have a NaN or an infinity before anything was trained.

    Args:
        name: of the problem.
        problem: whole, not in shards.

    Raises:
        ConfigError: it has one.
    """
    tensors = problem.constants()
    if _are_finite(tensors.values()):
        return
    path, tensor = next((path, tensor) for path, tensor in tensors.items() if not _are_finite([tensor]))
    raise ConfigError(
        f"problems.{name}.module: found {tensor[~tensor.isfinite()][0].item()} in the parameter '{path}' of "
        f"{named(problem.module)} before the first step; expected finite numbers. Correct how it begins: what __init__ "
        "puts there, or the file that it comes from."
    )


def _in_space(problem: Problem) -> str | None:
    """Return where in a shared space parameters are not finite: by their names, and the path that showed it."""
    if not isinstance(problem.module, SharedSpace) or problem.shards is not None:
        return None
    bad = [path for path, tensor in problem.constants().items() if not _are_finite([tensor])]
    more = f" and {len(bad) - MAX_NAMED} more" if len(bad) > MAX_NAMED else ""
    names = f"In the shared space of '{problem.name}' these are {', '.join(bad[:MAX_NAMED])}{more}."
    return f"{names} {problem.module.unsound or ''}".strip()


def _are_finite(tensors: Iterable[Tensor]) -> bool:
    # An empty tensor has no largest magnitude.
    filled = [tensor for tensor in tensors if tensor.numel()]
    # The largest magnitude: a sum of squares overflows where every number is finite.
    return not filled or bool(torch.stack(torch._foreach_norm(filled, math.inf)).isfinite().all())


def _local(tensor: Any) -> Tensor:
    """Return what this rank has of a tensor: all, or its shard."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part
