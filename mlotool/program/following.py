"""How solutions inside a loss follow the parameters that they depend on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mlotool.program.algorithms import algorithm_of
from mlotool.program.dependence import SolutionStep
from mlotool.program.differentiation import LowerLoss, Vector
from mlotool.program.problem import Problem
from mlotool.program.trajectory import Reading

Scope = dict[str, Mapping[str, Tensor]]


def push(
    steps: Sequence[SolutionStep],
    scope: Scope,
    moves: dict[str, Vector],
    problems: Mapping[str, Problem],
    at: Callable[[SolutionStep, Scope], tuple[Scope, LowerLoss]],
) -> None:
    """Add to `moves` how the solutions of `steps` move with those problems that are there already.

    Args:
        steps: nodes, each after its inputs.
        scope: tensors by problem; solutions are added.
        moves: by problem, how its parameters move.
        problems: by name.
        at: `(step, scope) -> (the tensors that its solution takes, its loss)`.
    """
    for step in steps:
        moving = {other for other in step.inputs if other in moves and other not in step.constants}
        if step.problem in moves or not moving:
            continue
        problem, (inputs, lower_loss) = problems[step.problem], at(step, scope)
        flat: list[Tensor] = []
        directions: list[Tensor] = []
        for other, tensors in inputs.items():
            flat += tensors.values()
            directions += moves[other] if other in moving else [torch.zeros_like(each) for each in tensors.values()]
        moves[problem.name] = algorithm_of(problem).push(lower_loss, flat, directions)
        scope[problem.name] = dict(zip(problem.theta, lower_loss.theta, strict=True))
        push(step.inner, scope, moves, problems, at)


def moved(problem: Problem, reading: Reading | None, move: Vector) -> Reading:
    """Return a problem as it is, or was where it is a reading, but for its parameters, which have moved."""
    reading = reading or Reading(problem.constants(), problem.stream)
    theta = {key: tensor + each for (key, tensor), each in zip(reading.theta.items(), move, strict=True)}
    return replace(reading, theta=theta)
