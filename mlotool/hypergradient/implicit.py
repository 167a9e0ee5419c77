"""Implicit differentiation: a solver and a kind of product."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from mlotool.core.arguments import require, require_fields
from mlotool.core.errors import ConfigError
from mlotool.core.replay import RandomState
from mlotool.core.tracing import report
from mlotool.hypergradient.diagnostics.hidden_values import warn_of_hidden_values
from mlotool.hypergradient.diagnostics.quality import Quality, assess
from mlotool.hypergradient.diagnostics.radius import warn_of_radius
from mlotool.hypergradient.differentiable_pullback import differentiable_pullback
from mlotool.hypergradient.products import AbstractProduct, FiniteDifferenceProduct, ReverseProduct
from mlotool.hypergradient.solvers import AbstractSolver, SolveResult, Status
from mlotool.hypergradient.vector import norm
from mlotool.problem.interface import AbstractHypergradient, LowerView, Vector


@dataclass
class Implicit(AbstractHypergradient):
    """`dtheta*_l/dx = -H^-1 M`, from the implicit function theorem at the current parameters.

    Betty's algorithms are points of this grid: AID-FD is `Implicit(Identity(), "finite_difference")`, AID-NMN
    `Implicit(Neumann(...))`, AID-CG `Implicit(ConjugateGradient(...))`.

    Args:
        solver: approximates `H^-1 v`.
        product: how `H u` and `M^T q` are computed: "reverse" (double backward, exact) or "finite_difference"
            (central differences; no second-order graph). These see through `detach` and `torch.no_grad` in the loss,
            unlike through `stop_gradient`; the first pullback of a problem looks whether that matters, and warns.
            Where the problem both shapes and reads a lower one, that one's solution moves along by its derivative,
            which costs a solve there a product.
        curvature: "total": where the problem both shapes and reads a lower one, H and M are derivatives of its
            TOTAL gradient; "partial" holds the lower solution fixed there (Betty's rule). Equal everywhere else.
        batch: the batch at which the pullback is taken: the "last" one the problem trained on, or a "fresh" one.
        radius: 2-norm of a finite difference's perturbation; None takes 0.03 of the parameters' root mean square in
            float32 and 4e-5 of it in float64, with a floor (`products.default_radius`). The first pullback of a
            problem takes the cross product at two radii more, and warns where they differ.
        warm_start: begin each solve at the last one's `q`, kept by problem and by the one above whose gradient it is.
            Not within differentiated pullbacks.
        report_every: every n-th pullback is also compared with a converged one, by reverse products; `statistics`
            then has the true residual `norm(H q - v) / norm(v)`, without damping, and the cosine between the two
            results. Changes nothing else. 0 is never.

    Raises:
        ConfigError: an argument is none of its choices.

    Cost: see the solver, plus one cross product. A report: a product a parameter of problems (tasks) of up to 2000,
    else up to 1500 products.

    Example:
        >>> from mlotool import ConjugateGradient, Implicit
        >>> Implicit(ConjugateGradient(max_iterations=20, tolerance=1e-8)).product
        'reverse'
    """

    solver: AbstractSolver
    product: Literal["reverse", "finite_difference"] = "reverse"
    curvature: Literal["total", "partial"] = "total"
    batch: Literal["last", "fresh"] = "last"
    radius: float | None = None
    warm_start: bool = False
    report_every: int = 0
    can_push = True
    last: SolveResult | None = field(default=None, init=False, repr=False)
    quality: Quality | None = field(default=None, init=False, repr=False, compare=False)
    num_pullbacks: int = field(default=0, init=False, repr=False, compare=False)
    _starts: dict[str, list[Tensor]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _warned: set[tuple[str, Status]] = field(default_factory=set, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        advice = "Write Implicit(ConjugateGradient()), or another solver."
        is_solver, expected = isinstance(self.solver, AbstractSolver), "a solver that is built"
        require(is_solver, "hypergradient.solver", self.solver, expected, advice)
        require_fields("hypergradient", self)
        if self.radius is not None and not self.radius > 0:
            raise ConfigError(
                f"hypergradient.radius: found {self.radius}; expected a positive norm or null. "
                "Leave it out to take a share of the parameters' size."
            )
        if self.report_every < 0:
            raise ConfigError(
                f"hypergradient.report_every: found {self.report_every!r}; expected a whole number of pullbacks, or 0 "
                "for never. Correct hypergradient.report_every."
            )
        if self.warm_start and not self.solver.uses_start:
            warnings.warn(
                f"hypergradient.warm_start: found true with {type(self.solver).__name__}, which has no use for a "
                "start; expected FixedPoint, ConjugateGradient or NormalEquationConjugateGradient. Set it to false.",
                stacklevel=3,
            )

    @property
    def needs_full_precision(self) -> bool:  # type: ignore[override]
        """Finite differences do."""
        return self.product == "finite_difference"

    @property
    def is_traceable(self) -> bool:  # type: ignore[override]
        """Unless it begins at the last solution, reports, or has a solver that keeps something."""
        return self.solver.is_traceable and not self.warm_start and not self.report_every

    @property
    def differentiates_twice(self) -> bool:  # type: ignore[override]
        """Products by reverse mode do; so do solvers that look at the loss themselves."""
        return self.product == "reverse" or self.solver.uses_loss or self.report_every > 0

    def pullback(self, view: LowerView, inputs: Vector) -> "_ImplicitPullback":
        """Return the pullback by the implicit function theorem."""
        return _ImplicitPullback(self, view)

    def check(self, problem: str, *, is_nested: bool, is_differentiated: bool) -> None:
        """Refuse finite differences where the pullback is differentiated.

        And, where it is differentiated, a solver that is neither a polynomial in H nor converges to its inverse: what
        it hands on would have another derivative than the exact solution, and a gradient that is wrong unseen.
        """
        if self.product == "finite_difference" and is_differentiated:
            raise ConfigError(
                f"problems.{problem}.hypergradient.product: found finite_difference, but a problem above '{problem}' "
                "both shapes and reads it, so its pullback is differentiated; expected reverse. Write "
                f"+hypergradient@problems.{problem}.hypergradient=cg, or set curvature: partial (or, if '{problem}' "
                "shapes none of those that it reads, product: finite_difference) on the problem above."
            )

        if is_differentiated and not self.solver.is_differentiable:
            raise ConfigError(
                f"problems.{problem}.hypergradient.solver: found {type(self.solver).__name__}, but a problem above "
                f"'{problem}' both shapes and reads it, so its pullback is differentiated; expected a solver whose "
                "derivative is known: ConjugateGradient, NormalEquationConjugateGradient, Exact, Neumann, FixedPoint "
                f"or Identity. Write +hypergradient@problems.{problem}.hypergradient=cg, or set curvature: partial on "
                "the problem that both shapes and reads."
            )

    def check_problem(self, problem: str, num_tasks: int | None) -> None:
        """Refuse what the solver cannot do with."""
        self.solver.check(problem, num_tasks)

    @property
    def moves_solutions(self) -> bool:  # type: ignore[override]
        """Whether products are finite differences."""
        return self.product == "finite_difference"

    def push(self, view: LowerView, inputs: Vector, directions: Vector) -> list[Tensor]:
        """Return `-H^-1 M d`, how theta*_l moves with its inputs."""
        return _ImplicitPullback(self, view).push(view.theta, inputs, directions)

    def statistics(self) -> dict[str, float]:
        """Return the last solve's residual and number of products, where the solver knows them.

        With `report_every`, the residual and the cosine of the last report.
        """
        found = {}
        if self.last is not None and self.last.residual is not None:
            found = {"solver_residual": float(self.last.residual), "solver_products": float(self.last.num_products)}
        if self.quality is not None:
            found |= {"solver_residual": self.quality.residual, "solver_cosine": self.quality.cosine}
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the starts, the count of pullbacks, the solver's state and what is reported, where there is any."""
        state: dict[str, Any] = {}
        if self.warm_start:
            state["starts"] = {name: list(start) for name, start in self._starts.items()}
        if self.report_every:
            state["num_pullbacks"] = self.num_pullbacks
        if self.last is not None and self.last.residual is not None:
            state["last"] = [self.last.status.value, self.last.num_products, float(self.last.residual)]
        if self.quality is not None:
            state["quality"] = [self.quality.residual, self.quality.cosine]
        of_solver = self.solver.state_dict()
        return {**state, "solver": of_solver} if of_solver else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the state back."""
        self._starts = {name: [tensor.clone() for tensor in each] for name, each in state.get("starts", {}).items()}
        self.num_pullbacks = state.get("num_pullbacks", 0)
        if "last" in state:
            # Its status was said when it happened, in words that may be others now.
            _, num_products, residual = state["last"]
            self.last = SolveResult([], Status.FIXED, num_products, residual)
        if "quality" in state:
            self.quality = Quality(*state["quality"])
        if "solver" in state:
            self.solver.load_state_dict(state["solver"])

    def reported(self, residual: Tensor) -> None:
        """Take the residual of a replay."""
        assert self.last is not None
        self.last = replace(self.last, residual=residual)

    def start(self, key: str, vector: Vector) -> list[Tensor] | None:
        """Return the last solution under `key` if it fits `vector`; None to begin at zero."""
        start = self._starts.get(key, [])
        if [(each.shape, each.dtype) for each in start] != [(each.shape, each.dtype) for each in vector]:
            return None
        return [each.to(like.device) for each, like in zip(start, vector, strict=True)]

    def keep(self, key: str, solution: Vector) -> None:
        """Keep a solution for the next start."""
        if self.warm_start and bool(norm(solution).isfinite()):
            self._starts[key] = list(solution)

    def record(self, problem: str, result: SolveResult) -> None:
        """Keep a solve's result, and warn the first time it failed in this way."""
        self.last = result
        if isinstance(result.residual, Tensor):
            # A trace: its replays know the residual, and nothing else changes.
            self.last = replace(result, solution=[], residual=None)
            report(self, result.residual)
        failures = self.solver.failures
        if result.status not in failures or (problem, result.status) in self._warned:
            return
        self._warned.add((problem, result.status))
        failed = sum(status in failures for status in result.task_statuses)
        where = f" at {failed} of {len(result.task_statuses)} tasks" if failed else ""
        warnings.warn(
            f"The {type(self.solver).__name__} solve at problem '{problem}' ended{where} with {result.status.value} "
            f"after {result.num_products} products. {failures[result.status]}",
            stacklevel=2,
        )


class _ImplicitPullback:
    """The pullback of one solution node; its evaluations share their random numbers."""

    def __init__(self, settings: Implicit, view: LowerView) -> None:
        self.settings = settings
        self.solver = settings.solver
        self._unpaired = view
        self._paired = _Paired(view)
        self.outputs = view.theta

    @cached_property
    def view(self) -> LowerView:
        """The loss, with the same random numbers in all evaluations."""
        return replace(self._unpaired, function=self._paired)

    def first_order(self, theta: Vector, inputs: Vector, wanted: Sequence[bool], cotangent: Vector) -> list[Tensor]:
        """Return `-M^T H^-1 v` for the wanted inputs."""
        # Without a differentiated pullback before it there is one evaluation, or a difference that pairs its own.
        settings = self.settings
        loss = self.view if self._paired.is_used or self.solver.uses_loss else self._unpaired
        settings.num_pullbacks += 1
        is_reported = settings.report_every > 0 and settings.num_pullbacks % settings.report_every == 0
        before = RandomState(loss.devices) if is_reported else None
        product, vector = self._product(loss, theta, inputs, wanted), self._unpaired.problem.reduce(cotangent)
        key = f"{loss.problem.name} for {loss.problem.reader}"
        start = settings.start(key, vector) if settings.warm_start else None
        solution = self._solve(product, vector, theta, inputs, start)
        settings.keep(key, solution)
        found = product.cross(solution, -1.0)
        if settings.product == "finite_difference":
            warn_of_hidden_values(
                self._unpaired,
                theta,
                inputs,
                wanted,
                solution,
                radius=settings.radius,
                with_hessian=self.solver.needs_products,
            )
            warn_of_radius(self._unpaired, theta, inputs, wanted, solution, settings.radius)
        if before is not None:
            # On the same random numbers; afterwards the generators go on as if nothing had been.
            with before.replayed():
                settings.quality = assess(loss, theta, inputs, wanted, vector, solution, found)
        return found

    def differentiable(self, theta: Vector, inputs: Vector, wanted: Sequence[bool], cotangent: Vector) -> list[Tensor]:
        """Return the same as functions of theta, the inputs and the cotangent."""
        return differentiable_pullback(self, theta, inputs, wanted, cotangent)

    def push(self, theta: Vector, inputs: Vector, directions: Vector) -> list[Tensor]:
        """Return `-H^-1 M d`."""
        product = self._product(self.view, theta, inputs, [True] * len(inputs))
        vector = self.view.problem.reduce(product.push(directions))
        return list(torch._foreach_neg(self._solve(product, vector, theta, inputs, None)))

    def solve(self, theta: Vector, inputs: Vector, vector: Vector) -> list[Tensor]:
        """Return `H^-1 v`."""
        product = self._product(self.view, theta, inputs, [False] * len(inputs))
        return self._solve(product, self.view.problem.reduce(vector), theta, inputs, None)

    def record(self, result: SolveResult) -> None:
        """Keep how a solve ended, and warn of a failure."""
        # Without a graph: what is kept outlives the step.
        constant = replace(result, solution=[q.detach() for q in result.solution])
        self.settings.record(self._unpaired.problem.name, constant)

    def _product(self, view: LowerView, theta: Vector, inputs: Vector, wanted: Sequence[bool]) -> AbstractProduct:
        if self.settings.product == "finite_difference":
            return FiniteDifferenceProduct(view, theta, inputs, wanted, self.settings.radius)
        return ReverseProduct(view, theta, inputs, wanted)

    def _solve(
        self, product: AbstractProduct, vector: Vector, theta: Vector, inputs: Vector, start: Vector | None
    ) -> list[Tensor]:
        reduce, loss = self._unpaired.problem.reduce, self._unpaired
        if self.solver.uses_loss:
            paired, constants = self.view, [tensor.detach() for tensor in inputs]
            point = tuple(tensor.detach() for tensor in theta)
            loss = replace(paired, theta=point, function=lambda moved, _: paired(moved, constants))
        result = self.solver.solve(lambda direction: reduce(product.hessian(direction)), vector, start=start, view=loss)
        if not isinstance(result, SolveResult):
            raise ConfigError(
                f"{type(self.solver).__name__}.solve: found {type(result).__name__}; expected a SolveResult. Return "
                "mlotool.hypergradient.SolveResult(solution, status, num_products)."
            )
        self.record(result)
        return result.solution


class _Paired:
    """A loss that draws the same random numbers each time."""

    def __init__(self, view: LowerView) -> None:
        self._loss = view
        self._random: RandomState | None = None

    @property
    def is_used(self) -> bool:
        """Whether it has drawn random numbers."""
        return self._random is not None

    def __call__(self, theta: Vector, inputs: Vector) -> Tensor:
        if self._random is None:
            self._random = RandomState(self._loss.devices)
        else:
            self._random.restore()
        return self._loss(theta, inputs)
