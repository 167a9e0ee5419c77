"""A program's hypergradients beside the most exact ones, and beside finite differences of the solved program."""

import copy
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mlotool.core.errors import ConfigError
from mlotool.core.replay import RandomState
from mlotool.hypergradient.first_order import FirstOrder
from mlotool.hypergradient.implicit import Converged, Implicit
from mlotool.hypergradient.solvers.base import SolveResult, Status
from mlotool.hypergradient.unrolled import Unrolled
from mlotool.program import AbstractHypergradient, Program

Batches = Mapping[str, Any]

# The difference of a hypergradient by finite differences from the same by double backward, relative to its size, from
# which on a note says so.
_DIFFERENT = 0.1


@dataclass(frozen=True)
class Response:
    """One way to compute a hypergradient, compared with the most exact one.

    Args:
        name: of the algorithm.
        norm: 2-norm of the hypergradient; None where it failed.
        cosine: to the most exact one; None where either is zero.
        error: `norm(g - exact) / norm(exact)`; None where exact is zero.
        seconds: wall time of one evaluation.
        has_converged: false where a solve did not.
        note: what a person should know: how a solve ended, or why there is no number.

    Example:
        >>> Response("neumann", norm=1.0, cosine=0.99, error=0.1).has_converged
        True
    """

    name: str
    norm: float | None = None
    cosine: float | None = None
    error: float | None = None
    seconds: float | None = None
    has_converged: bool = True
    note: str = ""


def with_algorithms(
    program: Program, exchange: Callable[[str, AbstractHypergradient], AbstractHypergradient]
) -> Program:
    """Return a program of the same problems, modules and streams with other hypergradients.

    Args:
        program: stays as it is.
        exchange: from a problem's name and algorithm to the new one.

    Raises:
        ConfigError: an algorithm cannot do what the graph asks of it.

    Example:
        >>> import torch
        >>> from mlotool import Exact, Graph, Identity, Implicit, Problem, Program
        >>> class Point(torch.nn.Module):
        ...     def __init__(self): super().__init__(); self.x = torch.nn.Parameter(torch.tensor([2.0]))
        ...     def forward(self): return self.x
        >>> lower = Problem("w", Point(), lambda batch, *, w, u: ((w() - u()) ** 2).sum(),
        ...                 roles={"w": "w", "u": "u"}, hypergradient=Implicit(Exact()))
        >>> upper = Problem("u", Point(), lambda batch, *, w: (w() ** 2).sum(), roles={"w": "w"})
        >>> program = Program([lower, upper], Graph({"u": ["w"]}, {"w": ["u"]}))
        >>> with_algorithms(program, lambda name, old: Implicit(Identity(0.25))).gradient("u")
        {'x': tensor([2.])}
    """
    problems = []
    for problem in program.problems.values():
        other = copy.copy(problem)
        if problem.hypergradient is not None:
            other.hypergradient = exchange(problem.name, problem.hypergradient)
        problems.append(other)
    return Program(problems, program.graph, program.internals.engine.rank_mean.reduce)


def most_exact(program: Program) -> Program:
    """Return the program with the most exact hypergradients that fit: all steps, a dense or a converged solve.

    Example:
        >>> import torch
        >>> from mlotool import Exact, Graph, Implicit, Problem, Program
        >>> class Point(torch.nn.Module):
        ...     def __init__(self): super().__init__(); self.x = torch.nn.Parameter(torch.tensor([2.0]))
        ...     def forward(self): return self.x
        >>> lower = Problem("w", Point(), lambda batch, *, w, u: ((w() - u()) ** 2).sum(),
        ...                 roles={"w": "w", "u": "u"}, hypergradient=Implicit(Exact()))
        >>> upper = Problem("u", Point(), lambda batch, *, w: (w() ** 2).sum(), roles={"w": "w"})
        >>> program = Program([lower, upper], Graph({"u": ["w"]}, {"w": ["u"]}))
        >>> most_exact(program).gradient("u")
        {'x': tensor([4.])}
    """
    return with_algorithms(program, lambda _, old: Unrolled() if old.sees_steps else Implicit(Converged()))


def compare(
    program: Program, upper: str, batches: Batches, others: Mapping[str, Callable[[], AbstractHypergradient]]
) -> Iterator[Response]:
    """Yield the most exact response first, then the program's own, then others'; parameters stay as they are.

    Args:
        program: the program at the parameters in question.
        upper: the problem whose hypergradient is taken.
        batches: by problem, what `Program.gradient` takes.
        others: algorithms by name; each replaces those of all problems.

    Example:
        >>> import torch
        >>> from mlotool import Exact, Graph, Implicit, Problem, Program
        >>> class Point(torch.nn.Module):
        ...     def __init__(self): super().__init__(); self.x = torch.nn.Parameter(torch.tensor([2.0]))
        ...     def forward(self): return self.x
        >>> lower = Problem("w", Point(), lambda batch, *, w, u: ((w() - u()) ** 2).sum(),
        ...                 roles={"w": "w", "u": "u"}, hypergradient=Implicit(Exact()))
        >>> upper = Problem("u", Point(), lambda batch, *, w: (w() ** 2).sum(), roles={"w": "w"})
        >>> program = Program([lower, upper], Graph({"u": ["w"]}, {"w": ["u"]}))
        >>> for response in compare(program, "u", {}, {"none": FirstOrder}):
        ...     print(response.name, response.norm, response.error)
        most exact 4.0 0.0
        this recipe's 4.0 0.0
        none 0.0 1.0
    """
    exact, response = _measured("most exact", most_exact(program), upper, batches, None)
    yield response
    own, response = _measured("this recipe's", program, upper, batches, exact)
    yield response if own is None else _with_note_of_differences(program, upper, batches, own, response)
    for name, make in others.items():
        if isinstance(make(), FirstOrder):
            yield Response(name, 0.0, None, 1.0, 0.0, note="the control: no gradient through a solution")
            continue
        with warnings.catch_warnings():
            # Its note says how a solve ended; without the row's name a warning would seem to be of the recipe's own.
            warnings.filterwarnings("ignore", r"The \w+ solve at problem|problems\.\w+\.loss: found", UserWarning)
            try:
                other = with_algorithms(program, lambda _, old, make=make: make())  # type: ignore[misc]
            except ConfigError as error:
                yield Response(name, note=f"refused: {_first_sentence(error)}")
            else:
                yield _measured(name, other, upper, _batches_of(other, program, batches), exact)[1]


def _with_note_of_differences(
    program: Program, upper: str, batches: Batches, own: Tensor, response: Response
) -> Response:
    """Return the response, with a note where its finite differences are not what double backward gives."""

    def by_reverse(_: str, old: AbstractHypergradient) -> AbstractHypergradient:
        return replace(old, product="reverse") if isinstance(old, Implicit) and old.moves_solutions else old

    other = with_algorithms(program, by_reverse)
    reverse = _measured("", other, upper, batches, own)[1]
    if reverse.error is None or reverse.error < _DIFFERENT:
        return response
    note = f"{reverse.error:.0%} off from product=reverse; see detach, kinks, hypergradient.radius"
    return replace(response, note=f"{response.note}; {note}" if response.note else note)


def sees_steps(program: Program, name: str) -> bool:
    """Return whether the hypergradient of problem `name` differentiates its steps.

    Example:
        >>> from mlotool import Graph, Problem
        >>> loss = lambda batch, *, w: w(batch).sum()
        >>> problem = Problem("w", torch.nn.Linear(1, 1), loss, roles={"w": "w"}, hypergradient=Unrolled())
        >>> sees_steps(Program([problem], Graph()), "w")
        True
    """
    algorithm = program.problems[name].hypergradient
    return algorithm is not None and algorithm.sees_steps


def _batches_of(other: Program, program: Program, batches: Batches) -> Batches:
    """Return the batches in the form that other algorithms take: one, where the program's own has one a step."""
    return {
        name: batch[-1] if sees_steps(program, name) and not sees_steps(other, name) else batch
        for name, batch in batches.items()
    }


def _measured(
    name: str, program: Program, upper: str, batches: Batches, exact: Tensor | None
) -> tuple[Tensor | None, Response]:
    began = time.perf_counter()
    try:
        with same_numbers(program):
            gradient = flat(program.gradient(upper, batches))
    except (ConfigError, RuntimeError) as failure:
        return None, Response(name, note=_first_sentence(failure))
    seconds = time.perf_counter() - began
    norm = float(gradient.norm())
    exact = gradient if exact is None else exact
    length = float(exact.norm())
    cosine = (1.0 if gradient is exact else float(gradient @ exact) / (norm * length)) if norm and length else None
    error = float((gradient - exact).norm()) / length if length else None
    states = {problem: program.internals.algorithm_state(problem) for problem in program.problems}
    solves = [(problem, getattr(state, "last", None)) for problem, state in states.items()]
    # How solves ended, where they were to converge.
    ends = {problem: end for problem, end in solves if isinstance(end, SolveResult) and end.status is not Status.FIXED}
    notes = [
        f"{problem}: {end.status.value}" + ("" if end.residual is None else f", residual {end.residual:.1e}")
        for problem, end in ends.items()
    ]
    has_converged = all(end.status is Status.CONVERGED for end in ends.values())
    return gradient, Response(name, norm, cosine, error, seconds, has_converged, "; ".join(notes))


@contextmanager
def same_numbers(program: Program) -> Iterator[None]:
    """Let every evaluation begin at the same random numbers; afterwards they go on as if nothing had been.

    Example:
        >>> from mlotool import Graph, Problem
        >>> problem = Problem("w", torch.nn.Linear(1, 1), lambda batch, *, w: w(batch).sum(), roles={"w": "w"})
        >>> program = Program([problem], Graph())
        >>> with same_numbers(program):
        ...     first = torch.rand(1)
        >>> with same_numbers(program):
        ...     bool(torch.rand(1) == first)
        True
    """
    with program.random, RandomState(program.devices).replayed():
        torch.manual_seed(0)
        yield


def flat(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return tensors by parameter name as one of shape (number of parameters,), detached.

    Example:
        >>> flat({"weight": torch.ones(1, 2), "bias": torch.zeros(1)})
        tensor([1., 1., 0.])
    """
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors.values()])


def _first_sentence(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:160]


# Of a finite difference of the solved program, relative to the norm of the upper parameters, in float64.
STEP = 1e-3

# Largest gradient of the solved lower problems, relative to before.
SOLVED = 1e-4


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
    below.sort(key=lambda name: len(program.graph.below(name)))
    solved = [name for name in below if not sees_steps(program, name)]
    if 0 < len(solved) < len(below):
        return Slope(note="some of the problems below are unrolled, and others are not")
    if reason := _cannot_solve(program, solved, max_parameters):
        return Slope(note=reason)
    before = _stationarity(program, solved, batches)
    saved = {name: flat(program.problems[name].constants()) for name in (*solved, upper)}

    def value() -> float:
        if solved:
            _solve(program, solved, batches)
            return float(program.loss(upper, batches.get(upper)).loss)
        with same_numbers(program):
            return float(program.internals.unrolled_loss(upper, batches))

    def gradient(program: Program) -> Tensor:
        with nullcontext() if solved else same_numbers(program):
            return flat(program.gradient(upper, batches))

    residual = None
    try:
        if solved:
            _solve(program, solved, batches)
            residual = _stationarity(program, solved, batches) / max(before, torch.finfo(torch.float64).tiny)
            if residual > SOLVED:
                return Slope(
                    residual, note=(f"the lower problems' gradients shrink only to {residual:.1e} of their size")
                )
        exact, own = gradient(most_exact(program)), gradient(program)
        length = float(exact.norm())
        if length == 0.0:
            return Slope(residual, note="the hypergradient is zero here")
        direction = exact / length
        step = STEP * max(1.0, float(saved[upper].norm()))
        ends = []
        for sign in (1.0, -1.0):
            _put(program, upper, saved[upper] + sign * step * direction)
            ends.append(value())
        return Slope(residual, (ends[0] - ends[1]) / (2 * step), length, float(own @ direction))
    finally:
        for name, values in saved.items():
            _put(program, name, values)


def _cannot_solve(program: Program, below: Sequence[str], max_parameters: int) -> str:
    for name in below:
        problem = program.problems[name]
        size = sum(tensor.numel() for tensor in problem.theta.values())
        if size > max_parameters:
            return f"'{name}' has {size} parameters; only problems of up to {max_parameters} are solved"
        if set(program.graph.upper_to_lower.get(name, ())) & set(program.graph.below(name)):
            return f"'{name}' both shapes and reads a lower problem; such a program is not solved here"
    return ""


def _solve(program: Program, below: Sequence[str], batches: Batches) -> None:
    for name in below:
        problem = program.problems[name]
        parameters = list(problem.theta.values())
        optimizer = torch.optim.LBFGS(
            parameters, 1.0, 2000, None, 1e-12, 0.0, history_size=50, line_search_fn="strong_wolfe"
        )

        def closure(name: str = name, parameters: list[Any] = parameters) -> Tensor:
            with torch.enable_grad():
                loss = program.internals.direct_loss(name, batches.get(name)).loss
            slopes = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
            for parameter, slope in zip(parameters, slopes, strict=True):
                parameter.grad = slope
            return loss

        with same_numbers(program):
            optimizer.step(closure)
        for parameter in parameters:
            parameter.grad = None


def _stationarity(program: Program, below: Sequence[str], batches: Batches) -> float:
    return sum(float(flat(program.gradient(name, batches)).square().sum()) for name in below) ** 0.5


def _put(program: Program, name: str, values: Tensor) -> None:
    parameters = list(program.problems[name].theta.values())
    with torch.no_grad():
        for parameter, part in zip(parameters, values.split([x.numel() for x in parameters]), strict=True):
            parameter.copy_(part.view_as(parameter))
