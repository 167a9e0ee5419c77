"""Optimizer steps of the same problem of several members, by as few calls of a kernel as they have settings."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

from torch import Tensor

from mlotool.problem.fused_step import take_steps
from mlotool.problem.problem import Problem
from mlotool.program.gradient_plan import Gradient


def step_together(
    problems: Sequence[Problem],
    gradients: Sequence[Gradient],
    contexts: Sequence[AbstractContextManager[None]] | None = None,
) -> list[Tensor | Exception | None]:
    """Take one step of each problem, with the bits of `Problem.step`.

    Args:
        problems: of several members.
        gradients: of each, before clipping.
        contexts: of each, in which its step is taken by itself; None where no optimizer draws random numbers.

    Returns:
        Of each, the norm of its gradient where that is clipped, or the error of its step.
    """
    found: list[Tensor | Exception | None] = []
    calls, moved = [], []
    for place, (problem, gradient) in enumerate(zip(problems, gradients, strict=True)):
        try:
            if contexts is not None:
                with contexts[place]:
                    found.append(problem.step(gradient))
                continue
            clipped, norm = problem.optimizer_step.clip(gradient)
            steps = problem.optimizer_step.kernel_steps(clipped)
            found.append(problem.step(gradient) if steps is None else norm)
        except Exception as error:
            found.append(error)
            continue
        if steps is not None:
            calls += steps
            moved.append(place)
    take_steps(calls)
    for place in moved:
        try:
            problems[place].advance()
        except Exception as error:
            found[place] = error
    return found
