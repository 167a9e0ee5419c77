"""Implicit differentiation: a solver and a kind of product.

theta*_l(x) solves F(theta, x) = dC_l/dtheta = 0, so for a cotangent v
    q = H^-1 v,   cotangent of x = -M^T q,   with H = dF/dtheta and M = dF/dx.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from mlotool.core.replay import RandomState
from mlotool.core.settings import Positive, Whole, target
from mlotool.core.tracing import report
from mlotool.hypergradient.products.base import AbstractProduct, PairedLoss, ReverseProduct, stationarity
from mlotool.hypergradient.products.finite_difference import FiniteDifferenceProduct, warn_of_differences
from mlotool.hypergradient.products.forward import ForwardProduct, chosen_product
from mlotool.hypergradient.solvers import base
from mlotool.hypergradient.solvers.base import AbstractSolver, Matvec, SolveResult, Start, Status, View
from mlotool.hypergradient.solvers.conjugate_gradient import ConjugateGradient, NormalEquationConjugateGradient
from mlotool.hypergradient.solvers.exact import Exact
from mlotool.hypergradient.vector import (
    add,
    aliases,
    chosen,
    constants,
    dot,
    is_finite,
    leaves,
    norm,
    scaled,
    vector_jacobian,
)
from mlotool.problem.interface import AbstractHypergradient, LowerView, Memory, Vector

# Up to here, of each task, the reference is the dense solve.
MAX_DENSE_PARAMETERS = 2000

# Of the reference's conjugate gradients beyond.
MAX_ITERATIONS = 500


class Quality(NamedTuple):
    """How exact a hypergradient was, by comparison with a converged solve.

    Args:
        residual: `norm(H q - v) / norm(v)`; the largest over tasks.
        cosine: between the pullback's result, over all inputs together, and that of a converged solve; 0 where one of
            them alone is zero.

    Example:
        >>> Quality(residual=0.1, cosine=0.98).cosine
        0.98
    """

    residual: float
    cosine: float


def assess(
    view: LowerView,
    theta: Vector,
    inputs: Vector,
    wanted: Sequence[bool],
    vector: Vector,
    solution: Vector,
    cotangents: Vector,
) -> Quality:
    """Compare a pullback with a converged one, by reverse products.

    Args:
        view: the loss; it is evaluated once.
        theta: the point.
        inputs: what theta*_l depends on.
        wanted: which of the inputs want a cotangent.
        vector: v, the mean over ranks.
        solution: q.
        cotangents: of the wanted inputs.

    Example:
        >>> import torch
        >>> from mlotool.problem.interface import LowerProblem
        >>> loss = lambda theta, inputs: ((theta[0] - inputs[0]) ** 2).sum()
        >>> theta, inputs = [torch.tensor([2.0])], [torch.tensor([1.0])]
        >>> view = LowerView(LowerProblem("w"), tuple(theta), loss)
        >>> vector, half = [torch.ones(1)], [torch.tensor([0.5])]
        >>> assess(view, theta, inputs, [True], vector, solution=half, cotangents=[torch.ones(1)])
        Quality(residual=0.0, cosine=1.0)
    """
    product, num_tasks = ReverseProduct(view, theta, inputs, wanted), view.problem.num_tasks
    lengths = norm(vector, num_tasks)
    errors = norm(add(product.hessian(solution), vector, -1.0), num_tasks)
    residual = torch.where(errors == 0, 0.0, errors / lengths)
    reference = list(torch._foreach_neg(product.cross(Converged().solve(product.hessian, vector, view=view).solution)))
    return Quality(float(residual.max()), _cosine(cotangents, reference))


@dataclass(frozen=True)
class Converged(AbstractSolver):
    """The most exact solve that is feasible: dense, else conjugate gradient (normal equations for an indefinite H).

    Example:
        >>> import torch
        >>> from mlotool.problem.interface import LowerProblem
        >>> loss = lambda theta, inputs: ((theta[0] - inputs[0]) ** 2).sum()
        >>> theta, inputs = [torch.tensor([2.0])], [torch.tensor([1.0])]
        >>> view = LowerView(LowerProblem("w"), tuple(theta), loss)
        >>> Converged().solve(lambda u: [2.0 * u[0]], [torch.ones(1)], view=view).solution
        [tensor([0.5000])]
    """

    failures = {**ConjugateGradient.failures, **Exact.failures}  # noqa: RUF012

    def solve(self, matvec: Matvec, vector: Vector, *, start: Start = None, view: View = None) -> SolveResult:
        """Return the solution, and how it ended."""
        size = sum(tensor.numel() for tensor in vector) // (base.tasks_of(view) or 1)
        if size <= MAX_DENSE_PARAMETERS:
            return Exact(max_parameters=MAX_DENSE_PARAMETERS).solve(matvec, vector, view=view)
        settings = MAX_ITERATIONS, torch.finfo(vector[0].dtype).eps ** 0.75
        result = ConjugateGradient(*settings).solve(matvec, vector, view=view)
        if result.status is Status.NEGATIVE_CURVATURE:
            result = NormalEquationConjugateGradient(*settings).solve(matvec, vector, view=view)
        return result


def _cosine(a: Vector, b: Vector) -> float:
    lengths = float(norm(a)), float(norm(b))
    if not all(lengths):
        return float(lengths[0] == lengths[1])
    # In two steps: the product of small lengths underflows.
    return float(dot(torch._foreach_div(list(a), lengths[0]), torch._foreach_div(list(b), lengths[1])))


class ImplicitState(NamedTuple):
    """What is kept.

    Args:
        solver: what the solver keeps.
        last: how the last solve ended, without its solution.
        quality: the last report.
        num_pullbacks: so far, where every n-th is reported.
        starts: by reader, the last solution, where solves begin there.

    Example:
        >>> ImplicitState(None).num_pullbacks
        0
    """

    solver: Any
    last: SolveResult | None = None
    quality: Quality | None = None
    num_pullbacks: int = 0
    starts: Mapping[str, Vector] | None = None


@target("hypergradient")
@dataclass(frozen=True)
class Implicit(AbstractHypergradient):
    """Implicit differentiation: the gradient through a solution by the implicit function theorem.

        dtheta*/dx = -H^-1 M,   H = d^2 C/dtheta^2,   M = d^2 C/(dtheta dx)
        with v = dF/dtheta of the loss F that reads the solution:   q = H^-1 v,   gradient with respect to x = -M^T q

    C is the loss of the problem, theta its current parameters, and x the parameters of the problems above. The `solver`
    computes q, and `product` says how the products with H and M^T are computed.

    Betty's methods are special cases: AID-FD is `Implicit(Identity(), "finite_difference")`, AID-NMN is
    `Implicit(Neumann(...))`, and AID-CG is `Implicit(ConjugateGradient(...))`.

    Args:
        solver: approximates `H^-1 v`.
        product: how `H u` and `M^T q` are computed. "reverse": double backward, exact. "forward": forward mode over
            reverse mode, exact; it evaluates the loss for each product and keeps no graph of the gradient, which saves
            memory. "finite_difference": central differences of gradients, without a graph of the gradient. "auto":
            "forward" if blocks of the problem's module are evaluated again (`remat`), else "reverse". Finite
            differences ignore `detach` and `torch.no_grad` in the loss (write `stop_gradient` instead), and are wrong
            across kinks; a run warns of both, and `mlotool check` compares them with double backward. If the problem
            itself shapes and reads a lower problem, "forward" and "finite_difference" need one more solve for that
            lower problem per product.
        curvature: matters only if the problem itself shapes and reads a lower problem. "total": H and M are derivatives
            of its total gradient, with the lower solution as a function of theta and x. "partial": the lower solution
            is held fixed (Betty's rule).
        batch: the batch on which H and M are computed: the "last" one that the problem trained on, or a "fresh" one.
        radius: for finite differences, the 2-norm of the perturbation of the parameters. None: 0.03 times the
            parameters' root mean square in float32 and 4e-5 times in float64, with a lower bound.
        warm_start: whether each solve begins at the q of the last solve, which is kept for each problem above. Not used
            where the hypergradient is itself differentiated.
        report_every: compare every n-th hypergradient with one from a converged solve by reverse products; 0: never.
            The log then has the true relative residual `norm(H q - v) / norm(v)`, without damping, and the cosine
            between the two results. Training does not change.

    Raises:
        ConfigError: an argument has another value than these.

    Cost: that of the solver, and one product with M^T. A report costs one Hessian-vector product per parameter for
    problems (or tasks) of up to 2000 parameters, and up to 1500 products for larger ones.

    Source: Lorraine et al. 2020 (arXiv 1911.02590); Choe et al. 2023, Betty (arXiv 2207.02849).

    Example:
        >>> from mlotool import ConjugateGradient, Implicit
        >>> Implicit(ConjugateGradient(max_iterations=20, tolerance=1e-8)).product
        'reverse'
    """

    solver: AbstractSolver
    product: Literal["reverse", "forward", "finite_difference", "auto"] = "reverse"
    curvature: Literal["total", "partial"] = "total"
    batch: Literal["last", "fresh"] = "last"
    radius: Positive | None = None
    warm_start: bool = False
    report_every: Whole = 0
    can_push = True

    def __post_init__(self) -> None:
        if self.warm_start and not self.solver.uses_start:
            warnings.warn(
                f"hypergradient.warm_start: found true with {type(self.solver).__name__}, which cannot use a start; "
                "expected FixedPoint, ConjugateGradient or NormalEquationConjugateGradient. Set it to false.",
                stacklevel=3,
            )

    @property
    def needs_full_precision(self) -> bool:  # type: ignore[override]
        """Whether autocast is switched off: for finite differences."""
        return self.product == "finite_difference"

    @property
    def is_traceable(self) -> bool:  # type: ignore[override]
        """Whether a trace holds for later steps: not with warm starts, reports, forward mode or stateful solvers."""
        is_kept = self.warm_start or self.report_every
        return self.solver.is_traceable and not is_kept and self.product != "forward"

    def pullback(self, view: LowerView, inputs: Vector) -> "_ImplicitPullback":
        """Return the backward pass through the solution, by the implicit function theorem."""
        return _ImplicitPullback(self, view)

    def check_problem(self, problem: str, num_tasks: int | None) -> None:
        """Refuse a problem that the solver does not support."""
        self.solver.check(problem, num_tasks)

    @property
    def pushes_solutions(self) -> bool:  # type: ignore[override]
        """Whether products are derivatives along directions."""
        return self.product in ("forward", "finite_difference")

    @property
    def moves_solutions(self) -> bool:  # type: ignore[override]
        """Whether products are finite differences."""
        return self.product == "finite_difference"

    def push(self, view: LowerView, inputs: Vector, directions: Vector) -> list[Tensor]:
        """Return `-H^-1 M d`, the derivative of the solution along a direction d of its inputs."""
        return _ImplicitPullback(self, view).push(view.theta, inputs, directions)

    def initial_state(self) -> ImplicitState:
        """Return the state before the first hypergradient."""
        return ImplicitState(self.solver.initial_state())

    def statistics(self, state: ImplicitState) -> dict[str, float]:
        """Return the residual and the number of products of the last solve, if the solver knows them.

        With `report_every`, return the residual and the cosine of the last report.
        """
        numbers, last, quality = {}, state.last, state.quality
        if last is not None and last.residual is not None:
            numbers = {"solver_residual": last.residual, "solver_products": float(last.num_products)}
        if quality is not None:
            numbers |= {"solver_residual": quality.residual, "solver_cosine": quality.cosine}
        return numbers

    def state_dict(self, state: ImplicitState) -> dict[str, Any]:
        """Return what there is of warm starts, the number of hypergradients, the solver's state and the statistics."""
        last = state.last
        saved: dict[str, Any] = {
            "starts": {reader: list(start) for reader, start in (state.starts or {}).items()},
            "num_pullbacks": state.num_pullbacks,
            "last": last and last.residual is not None and [last.status.value, last.num_products, last.residual],
            "quality": state.quality and list(state.quality),
            "solver": self.solver.state_dict(state.solver),
        }
        return {name: value for name, value in saved.items() if value}

    def load_state(self, saved: dict[str, Any]) -> ImplicitState:
        """Return the state that was saved."""
        solver = self.solver.load_state(saved["solver"]) if "solver" in saved else self.solver.initial_state()
        starts = {reader: tuple(start) for reader, start in saved.get("starts", {}).items()}
        # The last status was said when it happened, in words that may be others now.
        last = SolveResult([], Status.FIXED, *saved["last"][1:]) if "last" in saved else None
        quality = Quality(*saved["quality"]) if "quality" in saved else None
        return ImplicitState(solver, last, quality, saved.get("num_pullbacks", 0), starts or None)


class _ImplicitPullback:
    """The pullback of one solution node; its evaluations share their random numbers."""

    def __init__(self, settings: Implicit, view: LowerView) -> None:
        self.settings = settings
        self.solver = settings.solver
        self._unpaired = view
        self._paired = PairedLoss(view)
        self.outputs = view.theta

    @cached_property
    def view(self) -> LowerView:
        """The loss, with the same random numbers in all evaluations."""
        return replace(self._unpaired, own_loss=self._paired)

    def first_order(self, theta: Vector, inputs: Vector, wanted: Sequence[bool], cotangent: Vector) -> list[Tensor]:
        """Return `-M^T H^-1 v` for the wanted inputs."""
        # Random numbers have to be repeated only where the loss is evaluated more than once: after `differentiable`, or
        # by a solver that evaluates it. A finite difference repeats those of its own evaluations by itself.
        settings, problem = self.settings, self._unpaired.problem
        loss = self.view if self._paired.is_used or self.solver.uses_loss(self._unpaired) else self._unpaired
        before = RandomState(loss.devices) if settings.report_every and self._is_reported() else None
        if settings.product == "finite_difference":
            needs_hessian = self.solver.needs_products
            warn_of_differences(self._unpaired, theta, inputs, wanted, cotangent, settings.radius, needs_hessian)
        product = self._product(loss, theta, inputs, wanted)
        solution = self._solve(product, cotangent, theta, inputs, self._start(cotangent))
        if settings.warm_start and is_finite(solution):
            state: ImplicitState = problem.memory.value
            # As in one process, for a checkpoint.
            kept = solution if problem.num_parts == 1 else scaled(solution, 1 / problem.num_parts)
            starts = {**(state.starts or {}), problem.reader: tuple(kept)}
            problem.memory.value = state._replace(starts=starts)
        cotangents = product.cross(solution, -1.0)
        if before is not None:
            # On the same random numbers; afterwards the generators go on as if nothing had been.
            with before.replayed():
                quality = assess(loss, theta, inputs, wanted, cotangent, solution, cotangents)
            problem.memory.value = problem.memory.value._replace(quality=quality)
        return cotangents

    def _start(self, vector: Vector) -> list[Tensor] | None:
        """Return the last solution for the problem's reader, if it fits `vector`."""
        problem = self._unpaired.problem
        start = (problem.memory.value.starts or {}).get(problem.reader, ()) if self.settings.warm_start else ()
        if [(part.shape, part.dtype) for part in start] != [(part.shape, part.dtype) for part in vector]:
            return None
        placed = [part.to(like.device) for part, like in zip(start, vector, strict=True)]
        return placed if problem.num_parts == 1 else scaled(placed, float(problem.num_parts))

    def differentiable(self, theta: Vector, inputs: Vector, wanted: Sequence[bool], cotangent: Vector) -> list[Tensor]:
        """Return the same as functions of theta, the inputs and the cotangent, for problems that are nested above.

        So that it is exact to any order, the solution's node saves its OUTPUTS: differentiating the pullback with
        respect to theta leads back into the node. Partial derivatives are taken at aliases of theta*_l and of x, so
        that one with respect to x does not run through theta*_l again. The solve is a node of its own.
        """
        points, values = aliases(theta), aliases(inputs)
        gradient = stationarity(self.view, points, values)
        if self.solver.is_polynomial:
            matvec = self.view.mean_of(lambda vector: vector_jacobian(gradient, points, vector, create_graph=True))
            result = self.solver.solve(matvec, cotangent, view=self.view)
            self.record(result)
            solution: Vector = result.solution
        else:
            solution = _LinearSolve.apply(self, len(theta), *cotangent, *theta, *inputs)
        sources = chosen(values, wanted)
        solution = self.view.problem.rank_mean.shared(solution)
        return [-slope for slope in vector_jacobian(gradient, sources, solution, create_graph=True)]

    def push(self, theta: Vector, inputs: Vector, directions: Vector) -> list[Tensor]:
        """Return `-H^-1 M d`."""
        product = self._product(self.view, theta, inputs, [True] * len(inputs))
        return list(torch._foreach_neg(self._solve(product, product.push(directions), theta, inputs, None)))

    def solve(self, theta: Vector, inputs: Vector, vector: Vector) -> list[Tensor]:
        """Return `H^-1 v`, of which v is the mean over ranks."""
        product = self._product(self.view, theta, inputs, [False] * len(inputs))
        return self._solve(product, vector, theta, inputs, None)

    def record(self, result: SolveResult) -> None:
        """Keep how a solve ended, and warn the first time that it failed in this way."""
        problem = self._unpaired.problem
        solve = TracedSolve(
            self.solver, problem.name, problem.memory, problem.traits.warned_of, bool(result.task_statuses)
        )
        if result.ending is not None:
            report(solve, result.ending)
        solve.keep(result)

    def _is_reported(self) -> bool:
        """Count a pullback; return whether it is compared with a converged one."""
        memory = self._unpaired.problem.memory
        number = memory.value.num_pullbacks + 1
        memory.value = memory.value._replace(num_pullbacks=number)
        return bool(number % self.settings.report_every == 0)

    def _product(self, view: LowerView, theta: Vector, inputs: Vector, wanted: Sequence[bool]) -> AbstractProduct:
        if self.settings.product == "finite_difference":
            return FiniteDifferenceProduct(view, theta, inputs, wanted, self.settings.radius)
        kind = chosen_product(self.settings.product, self._unpaired, theta, inputs, wanted)
        return (ForwardProduct if kind == "forward" else ReverseProduct)(view, theta, inputs, wanted)

    def _solve(
        self, product: AbstractProduct, vector: Vector, theta: Vector, inputs: Vector, start: Vector | None
    ) -> list[Tensor]:
        loss = self._unpaired
        if self.solver.uses_loss(loss):
            paired, still = self._paired, constants(inputs)
            loss = replace(loss, theta=tuple(constants(theta)), own_loss=lambda at, _: paired(at, still))
        memory = loss.problem.memory
        kept = memory.value.solver
        result, state = self.solver.solve_from(kept, product.hessian, vector, start=start, view=loss)
        if state is not kept:
            memory.value = memory.value._replace(solver=state)
        self.record(result)
        return result.solution


class _LinearSolve(torch.autograd.Function):
    """`q = H(theta, x)^-1 v`, differentiated as the exact solution.

    For a cotangent w: p = H^-1 w is the cotangent of v, and `-d<p, H q>/d(theta, x)` that of theta and x.

    """

    @staticmethod
    def forward(ctx: Any, pullback: _ImplicitPullback, num_parameters: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Solve; `tensors` are v, theta and x."""
        vector, theta, inputs = _split(tensors, num_parameters)
        outputs = tuple(pullback.solve(theta, inputs, vector))
        # A solver may hand v itself on; a node's output must be a tensor of its own.
        outputs = tuple(q.clone() if any(q is v for v in vector) else q for q in outputs)
        ctx.pullback, ctx.num_parameters = pullback, num_parameters
        ctx.save_for_backward(*outputs, *theta, *inputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *cotangent: Tensor) -> tuple[Tensor | None, ...]:
        """Return the cotangents of v, theta and x."""
        pullback, count = ctx.pullback, ctx.num_parameters
        solution, theta, inputs = _split(ctx.saved_tensors, count)
        is_differentiable = torch.is_grad_enabled()
        with pullback.view.problem.random:
            if is_differentiable:
                adjoint = list(_LinearSolve.apply(pullback, count, *cotangent, *theta, *inputs))
            else:
                adjoint = pullback.solve(theta, inputs, cotangent)
        wanted = ctx.needs_input_grad[2 + count :]
        with pullback.view.problem.random, torch.enable_grad():
            if not is_differentiable:
                solution, theta, inputs = constants(solution), leaves(theta), leaves(inputs, wanted[count:])
            theta, inputs = aliases(theta), aliases(inputs)
            gradient = stationarity(pullback.view, theta, inputs)
            # Both solutions are the same on all ranks; what is found for theta and x is this rank's part.
            shared = pullback.view.problem.rank_mean.shared
            product = vector_jacobian(gradient, theta, shared(solution), create_graph=True)
            points = chosen((*theta, *inputs), wanted)
            slopes = iter(vector_jacobian(product, points, shared(adjoint), create_graph=is_differentiable))
        return (None, None, *adjoint, *(-next(slopes) if flag else None for flag in wanted))


def _split(tensors: Sequence[Tensor], count: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    return list(tensors[:count]), list(tensors[count : 2 * count]), list(tensors[2 * count :])


@dataclass(slots=True)
class TracedSolve:
    """A solve of a trace, of whose replays is known what they report.

    Args:
        solver: of the solve.
        problem: its name.
        memory: of the problem.
        warned_of: what the problem was warned of.
        has_tasks: whether it is one of tasks.

    Example:
        >>> from mlotool.hypergradient import Neumann
        >>> memory = Memory(ImplicitState(None))
        >>> TracedSolve(Neumann(), "w", memory, set()).reported(torch.tensor([0.5, 3.0, 0.0]))
        >>> memory.value.last.residual, memory.value.last.num_products
        (0.5, 3)
    """

    solver: AbstractSolver
    problem: str
    memory: Memory
    warned_of: set[object]
    has_tasks: bool = False

    def of(self, memory: Memory, warned_of: set[object]) -> "TracedSolve":
        """Return the same solve of a problem of equal structure in another program.

        Args:
            memory: of that one.
            warned_of: what that one was warned of.
        """
        return replace(self, memory=memory, warned_of=warned_of)

    def reported(self, ending: Tensor) -> None:
        """Keep how the solve of a replay ended, and warn of it. Argument as of `SolveResult`."""
        residual, count, *codes = ending.tolist()
        status, statuses = base.ended_with(codes, has_tasks=self.has_tasks)
        self.keep(SolveResult([], status, int(count), residual if math.isfinite(residual) else None, statuses))

    def keep(self, result: SolveResult) -> None:
        """Keep how a solve ended, without its solution, which would outlive the step; warn of a failure the first time.

        A failure is a status that the solver has a sentence for. Numbers that are not finite are warned of again, once
        a solve in between has had finite ones: there is a new reason then.
        """
        status, failures = result.status, self.solver.failures
        last = SolveResult([], status, result.num_products, result.residual, result.task_statuses)
        self.memory.value = self.memory.value._replace(last=last)
        if self.warned_of and status not in base.NOT_FINITE:
            self.warned_of.difference_update(base.NOT_FINITE)
        if status not in failures or status in self.warned_of:
            return
        self.warned_of.add(status)
        num_failed = sum(task_status in failures for task_status in result.task_statuses)
        where = f" at {num_failed} of {len(result.task_statuses)} tasks" if num_failed else ""
        warnings.warn(
            f"The {type(self.solver).__name__} solve at problem '{self.problem}' ended{where} with {status.value} "
            f"after {result.num_products} products. {failures[status]} The solver is {self.solver}.",
            stacklevel=3,
        )
