"""Optimizer steps of the same problem of several members, by as few calls of a kernel as they have settings."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from mlotool.problem.fused_step import KernelStep, take_steps
from mlotool.problem.problem import Problem
from mlotool.problem.update import Hyperparameters
from mlotool.program.gradient_plan import Gradient
from mlotool.program.prepared_step import stepped

OwnStep = tuple[Problem, Gradient, Sequence[Hyperparameters] | None]
"""A problem, its gradient before clipping, and hyperparameters by parameter, where another problem gives some."""


def step_together(
    steps: Sequence[OwnStep],
    contexts: Sequence[AbstractContextManager[None]] | None = None,
) -> list[Tensor | Exception | None]:
    """Take one step of each problem, with the bits of `Problem.step`.

    Args:
        steps: of several members.
        contexts: of each, in which its step is taken by itself; None where no optimizer draws random numbers.

    Returns:
        Of each, the norm of its gradient where that is clipped, or the error of its step.
    """
    found: list[Tensor | Exception | None] = []
    calls: list[KernelStep] = []
    waiting = []
    for place, (problem, gradient, given) in enumerate(steps):
        step = problem.optimizer_step
        try:
            if contexts is not None or given is not None or not step.is_plain:
                with nullcontext() if contexts is None else contexts[place]:
                    found.append(stepped(problem, gradient, given))
                continue
            clipped, norm = step.clip(gradient)
            calls += step.begin(clipped)
        except Exception as error:
            found.append(error)
        else:
            found.append(norm)
            waiting.append(place)
    take_steps(calls)
    for place in waiting:
        try:
            steps[place][0].advance()
        except Exception as error:
            found[place] = error
    return found
