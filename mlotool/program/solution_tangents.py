"""How much the solutions inside a loss change when the parameters that they depend on move along a direction."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mlotool.problem.interface import LowerView, Vector
from mlotool.problem.problem import Problem
from mlotool.problem.trajectory import LowerSnapshot
from mlotool.program.loss_plan import Values

if TYPE_CHECKING:
    from mlotool.program.solution_plan import SolutionPlan


def push(
    solutions: Sequence["SolutionPlan"],
    values: Values,
    moves: dict[int, Vector],
    at: Callable[["SolutionPlan", Values], tuple[list[Tensor], LowerView]],
) -> None:
    """Add to `moves` how solutions move with those problems that are there already.

    Args:
        solutions: each after its inputs.
        values: tensors by problem; solutions are added.
        moves: by number of the problem, how its parameters move.
        at: `(solution, values) -> (the tensors that it takes, the problem's view)`.
    """
    for each in solutions:
        moving = {number for number, is_constant, _ in each.inputs if number in moves and not is_constant}
        if each.number in moves or not moving:
            continue
        inputs, view = at(each, values)
        directions: list[Tensor] = []
        for number, _, part in each.inputs:
            directions += moves[number] if number in moving else [torch.zeros_like(tensor) for tensor in inputs[part]]
        moves[each.number] = each.algorithm.push(view, inputs, directions)
        values[each.number] = view.theta
        push(each.inner, values, moves, at)


def moved(problem: Problem, snapshot: LowerSnapshot | None, move: Vector) -> LowerSnapshot:
    """Return a problem as it is, or was where it is a snapshot, but for its parameters, which have moved."""
    snapshot = snapshot or LowerSnapshot(problem.current(), problem.stream)
    return replace(snapshot, theta=tuple(tensor + each for tensor, each in zip(snapshot.theta, move, strict=True)))
