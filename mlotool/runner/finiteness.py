"""Whether losses and parameters are still numbers, and what may have made them none."""

import math
from collections.abc import Container, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from mlotool.core.errors import ConfigError, NonFiniteParametersError
from mlotool.core.messages import described
from mlotool.core.user_code import named
from mlotool.problem.batches import Share
from mlotool.program import Problem, Program, Stream
from mlotool.spaces.shared.shared_space import SharedSpace

MAX_BATCHES = 100
"""Of the last ones, which are looked at for numbers that are not finite."""


def unsound_batch(problem: Problem) -> str | None:
    """Return in whole sentences which of a problem's last batches has numbers that are not finite; None where none.

    Cost: up to `MAX_BATCHES` of them are made again.
    """
    if not isinstance(problem.stream, Stream):
        return None
    try:
        batches = problem.stream.recent(MAX_BATCHES)
    except Exception:
        # A data set that now fails is not what is to be told.
        return None
    for shared in batches:
        batch, _ = Share.opened(shared)
        numbers = [each for each in tree_leaves(batch) if isinstance(each, Tensor) and each.is_floating_point()]
        if not all(bool(each.isfinite().all()) for each in numbers):
            return (
                f"One of the last batches of '{problem.name}' holds numbers that are not finite: "
                f"{described(batch)}. Correct the samples, or leave them out of the data set."
            )
    return None


def explain(problem: str, problems: Mapping[str, Problem], stepped: Container[str]) -> str:
    """Return, in whole sentences, what may have made the loss of a problem not finite, and what to do.

    A loss is NaN because of its batch, or of parameters that were bad before it was computed: its own, or those of
    problems whose modules it calls, which another problem's step may have spoiled. So the problem where it shows is
    rarely the one whose learning rate is too large.

    Args:
        problem: whose loss was the first that is not finite.
        problems: of the program, by name.
        stepped: the problems that had stepped before.
    """
    unsound = unsound_batch(problems[problem])
    if unsound is not None:
        return unsound
    sources = related(problem, problems)
    told = [sentence for name in sources if (sentence := unsound_path(problems[name])) is not None]
    suspects = [problems[name] for name in sources if name in stepped]
    if suspects:
        told += [advice(suspects), f"Else look for NaN in the data of '{problem}'."]
    else:
        told.append(
            f"Nothing that it depends on had been changed before: look for NaN in the data of '{problem}' and in its "
            "initial parameters, and for log, sqrt or a division at zero in its loss."
        )
    if problems[problem].settings.precision == "fp16":
        told.append(
            f"'{problem}' computes in fp16, whose numbers end at 65,504: problems.{problem}.precision=bf16 has the "
            "range of fp32."
        )
    return " ".join(told)


def unsound_path(problem: Problem) -> str | None:
    """Return on which path of a shared space a result was first not finite; None where nothing is known of one."""
    module = problem.module
    if not isinstance(module, SharedSpace) or module.unsound is None:
        return None
    return f"In the shared space of '{problem.name}': {module.unsound}"


def advice(suspects: Iterable[Problem]) -> str:
    """Return what to lower, with its value."""
    problems = list(suspects)
    keys = [_rate(each) for each in problems]
    if len(keys) == 1:
        return f"Lower {keys[0]}, or set problems.{problems[0].name}.gradient_clip_norm=1.0."
    return (
        f"Lower the one that is too large of {', '.join(keys[:-1])} and {keys[-1]}, or set that problem's "
        "gradient_clip_norm=1.0."
    )


def related(name: str, problems: Mapping[str, Problem]) -> Iterable[str]:
    """Return the problem and all whose parameters its own depend on, the nearest first."""
    found, waiting = {name: None}, [name]
    while waiting:
        node = problems[waiting.pop(0)].node
        for other in (*node.roles.values(), *node.other_uses.values()):
            if other in problems and other not in found:
                found[other] = None
                waiting.append(other)
    return found


def _rate(problem: Problem) -> str:
    """Return the key of the learning rate, with its value; one that another problem learns has that problem's name."""
    if "lr" in problem.settings.optimizer_roles:
        return f"the learning rate that '{problem.settings.optimizer_roles['lr']}' gives '{problem.name}'"
    rate = None if problem.optimizer is None else problem.optimizer.param_groups[0].get("lr")
    return f"problems.{problem.name}.optimizer.lr" + ("" if rate is None else f" ({float(rate):g} now)")


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
