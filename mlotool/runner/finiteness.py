"""Whether losses and parameters are still numbers, and what may have made them none."""

import math
from collections.abc import Container, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from mlotool.core.errors import ConfigError, NonFiniteParametersError
from mlotool.core.user_code import named
from mlotool.program import Problem, Program
from mlotool.spaces.shared.shared_space import SharedSpace


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
    sources = [problems[name] for name in related(problem, problems)]
    suspects = [source for source in sources if source.name in stepped]
    sentences = [*map(unsound_path, sources), _advice(suspects) if suspects else None]
    sentences.append(
        f"{'Else look' if suspects else 'Nothing that it depends on had been changed before: look'} for NaN in the "
        f"data of '{problem}' and for log, sqrt or a division at zero in its loss."
    )
    if problems[problem].settings.precision == "fp16":
        sentences.append(
            f"'{problem}' computes in fp16, whose numbers end at 65,504: problems.{problem}.precision=bf16 has the "
            "range of fp32."
        )
    return " ".join(filter(None, sentences))


def unsound_path(problem: Problem) -> str | None:
    """Return on which path of a shared space a result was first not finite; None where nothing is known of one."""
    module = problem.module
    if not isinstance(module, SharedSpace) or module.unsound is None:
        return None
    return f"In the shared space of '{problem.name}': {module.unsound}"


def related(name: str, problems: Mapping[str, Problem]) -> Iterable[str]:
    """Return the problem and all whose parameters its own depend on, the nearest first."""
    names, waiting = {name: None}, [name]
    while waiting:
        node = problems[waiting.pop(0)].node
        for other in (*node.roles.values(), *node.other_uses.values()):
            if other in problems and other not in names:
                names[other] = None
                waiting.append(other)
    return names


def _advice(suspects: Iterable[Problem]) -> str:
    rates = [_rate(problem) for problem in suspects]
    which = "" if len(rates) == 1 else "the one that is too large of "
    return f"Lower {which}{' and '.join(rates)}, or set that problem's gradient_clip_norm=1.0."


def _rate(problem: Problem) -> str:
    """Return the key of the learning rate, with its value; one that another problem learns has that problem's name."""
    if "lr" in problem.settings.optimizer_roles:
        return f"the learning rate that '{problem.settings.optimizer_roles['lr']}' gives '{problem.name}'"
    rate = None if problem.optimizer is None else problem.optimizer.param_groups[0].get("lr")
    return f"problems.{problem.name}.optimizer.lr" + ("" if rate is None else f" ({float(rate):g} now)")


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
        sentences = [unsound_path(program.problems[bad[0]]), _advice(suspects)]
        raise NonFiniteParametersError(bad[0], tick, bad[1:], " ".join(filter(None, sentences)))


def check_start(name: str, problem: Problem) -> None:
    """Refuse a module whose parameters have a NaN or an infinity before anything was trained.

    Args:
        name: of the problem.
        problem: whole, not in shards.

    Raises:
        ConfigError: it has one.
    """
    for path, tensor in problem.constants().items():
        if not _are_finite([tensor]):
            raise ConfigError(
                f"problems.{name}.module: found {tensor[~tensor.isfinite()][0].item()} in the parameter '{path}' of "
                f"{named(problem.module)} before the first step; expected finite numbers. Correct what __init__ puts "
                "there, or the file that it comes from."
            )


def _are_finite(tensors: Iterable[Tensor]) -> bool:
    # An empty tensor has no largest magnitude.
    filled = [tensor for tensor in tensors if tensor.numel()]
    # The largest magnitude: a sum of squares overflows where every number is finite.
    return not filled or bool(torch.stack(torch._foreach_norm(filled, math.inf)).isfinite().all())


def _local(tensor: Any) -> Tensor:
    """Return what this rank has of a tensor: all, or its shard."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part
