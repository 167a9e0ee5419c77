"""A program's hypergradients beside finite differences of the solved program."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mlotool.hypergradient.diagnostics.compare import Batches, flat, most_exact, same_numbers, sees_steps
from mlotool.program import Program

STEP = 1e-3
"""Of a finite difference of the solved program, relative to the norm of the upper parameters, in float64."""

SOLVED = 1e-4
"""Largest gradient of the solved lower problems, relative to before."""


@dataclass(frozen=True)
class Slope:
    """A directional derivative of the solved upper loss: by finite differences and by hypergradients.

    Args:
        stationarity: norm of the lower problems' gradients once they are solved, relative to before.
        difference: `(C(x + h d) - C(x - h d)) / 2h` with the lower problems solved again at both ends.
        exact: `<g, d>` of the most exact hypergradient at the solved program.
        own: `<g, d>` of the program's own hypergradient there.
        note: why there are no numbers.

    Example:
        >>> Slope(stationarity=1e-9, difference=4.0, exact=4.0, own=3.9).note
        ''
    """

    stationarity: float | None = None
    difference: float | None = None
    exact: float | None = None
    own: float | None = None
    note: str = ""


def solved_slope(program: Program, upper: str, batches: Batches, max_parameters: int = 3000) -> Slope:
    """Compare hypergradients with finite differences of the solved program; parameters are put back.

    Every lower problem is solved on its batch (L-BFGS), at the current upper parameters and at both ends of a step
    along the most exact hypergradient. Unrolled ones are not solved: their steps are taken again, at both ends.

    Args:
        program: in float64.
        upper: the problem.
        batches: by problem.
        max_parameters: of a lower problem, at most.

    Example:
        >>> import torch
        >>> from mlotool import Exact, Graph, Implicit, Problem, Program
        >>> class Point(torch.nn.Module):
        ...     def __init__(self): super().__init__(); self.x = torch.nn.Parameter(torch.full((1,), 2.0).double())
        ...     def forward(self): return self.x
        >>> lower = Problem("w", Point(), lambda batch, *, w, u: ((w() - u()) ** 2).sum(),
        ...                 roles={"w": "w", "u": "u"}, hypergradient=Implicit(Exact()))
        >>> upper = Problem("u", Point(), lambda batch, *, w: (w() ** 2).sum(), roles={"w": "w"})
        >>> program = Program([lower, upper], Graph({"u": ["w"]}, {"w": ["u"]}))
        >>> slope = solved_slope(program, "u", {})
        >>> round(slope.difference, 6), round(slope.exact, 6)
        (4.0, 4.0)
    """
    below = [name for name in program.problems if name in program.graph.below(upper)]
    below.sort(key=program.graph.level)
    if any(sees_steps(program, name) for name in below):
        return _unrolled_slope(program, upper, below, batches)
    reason = _cannot_solve(program, below, max_parameters)
    if reason:
        return Slope(note=reason)
    before = _stationarity(program, below, batches)
    saved = {
        name: [tensor.clone() for tensor in program.problems[name].constants().values()] for name in (*below, upper)
    }
    try:
        _solve(program, below, batches)
        residual = _stationarity(program, below, batches) / max(before, torch.finfo(torch.float64).tiny)
        if residual > SOLVED:
            return Slope(residual, note=f"the lower problems' gradients only go down to {residual:.1e} of before")
        exact = flat(most_exact(program).gradient(upper, batches))
        own = flat(program.gradient(upper, batches))
        length = float(exact.norm())
        if length == 0.0:
            return Slope(residual, note="the hypergradient is zero at the solved program")
        direction = exact / length
        step = STEP * max(1.0, float(flat(program.problems[upper].constants()).norm()))
        values = []
        for sign in (1.0, -1.0):
            _put(program, upper, saved[upper], sign * step * direction)
            _solve(program, below, batches)
            values.append(float(program.loss(upper, batches.get(upper)).loss))
        difference = (values[0] - values[1]) / (2 * step)
        return Slope(residual, difference, length, float(own @ direction))
    finally:
        for name, tensors in saved.items():
            _put(program, name, tensors, None)


def _unrolled_slope(program: Program, upper: str, below: Sequence[str], batches: Batches) -> Slope:
    if not all(sees_steps(program, name) for name in below):
        return Slope(note="some of the problems below are unrolled, and others are not")
    saved = [tensor.clone() for tensor in program.problems[upper].constants().values()]
    try:
        with same_numbers(program):
            exact = flat(most_exact(program).gradient(upper, batches))
        with same_numbers(program):
            own = flat(program.gradient(upper, batches))
        length = float(exact.norm())
        if length == 0.0:
            return Slope(note="the hypergradient is zero here")
        direction = exact / length
        step = STEP * max(1.0, float(flat(program.problems[upper].constants()).norm()))
        values = []
        for sign in (1.0, -1.0):
            _put(program, upper, saved, sign * step * direction)
            with same_numbers(program):
                values.append(float(program.unrolled_loss(upper, batches)))
        return Slope(None, (values[0] - values[1]) / (2 * step), length, float(own @ direction))
    finally:
        _put(program, upper, saved, None)


def _cannot_solve(program: Program, below: Sequence[str], max_parameters: int) -> str:
    for name in below:
        problem = program.problems[name]
        size = sum(tensor.numel() for tensor in problem.theta.values())
        if size > max_parameters:
            return f"'{name}' has {size} parameters; it is solved up to {max_parameters}"
        if set(program.graph.upper_to_lower.get(name, ())) & set(program.graph.below(name)):
            return f"'{name}' both shapes and reads a lower problem; such a program is not solved here"
    return ""


def _solve(program: Program, below: Sequence[str], batches: Batches) -> None:
    for name in below:
        problem = program.problems[name]
        parameters = list(problem.theta.values())
        optimizer = torch.optim.LBFGS(
            parameters, max_iter=2000, tolerance_grad=1e-12, tolerance_change=0.0, history_size=50,
            line_search_fn="strong_wolfe",
        )  # fmt: skip

        def closure(name: str = name, parameters: list[Any] = parameters) -> Tensor:
            with torch.enable_grad():
                loss = program.direct_loss(name, batches.get(name)).loss
            for parameter, slope in zip(
                parameters, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True
            ):
                parameter.grad = torch.zeros_like(parameter) if slope is None else slope
            return loss

        with same_numbers(program):
            optimizer.step(closure)
        for parameter in parameters:
            parameter.grad = None


def _stationarity(program: Program, below: Sequence[str], batches: Batches) -> float:
    return sum(float(flat(program.gradient(name, batches)).square().sum()) for name in below) ** 0.5


def _put(program: Program, name: str, tensors: Sequence[Tensor], change: Tensor | None) -> None:
    parts = iter(() if change is None else change.split([tensor.numel() for tensor in tensors]))
    with torch.no_grad():
        for parameter, value in zip(program.problems[name].theta.values(), tensors, strict=True):
            parameter.copy_(value if change is None else value + next(parts).view_as(value))
