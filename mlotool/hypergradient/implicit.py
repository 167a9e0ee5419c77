"""Implicit differentiation: a solver and a kind of product."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from mlotool.core.errors import ConfigError
from mlotool.core.replay import Habit, RandomState
from mlotool.core.suggest import did_you_mean
from mlotool.hypergradient.products import AbstractProduct, FiniteDifferenceProduct, ReverseProduct
from mlotool.hypergradient.solution import Solution
from mlotool.hypergradient.solvers import AbstractSolver, SolveResult, Status
from mlotool.program.differentiation import AbstractHypergradient, LowerLoss, Vector


@dataclass
class Implicit(AbstractHypergradient):
    """`dtheta*_l/dx = -H^-1 M`, from the implicit function theorem at the current parameters.

    Betty's algorithms are points of this grid: AID-FD is `Implicit(Identity(), "finite_difference")`, AID-NMN
    `Implicit(Neumann(...))`, AID-CG `Implicit(ConjugateGradient(...))`.

    Args:
        solver: approximates `H^-1 v`.
        product: how `H u` and `M^T q` are computed: "reverse" (double backward, exact) or "finite_difference"
            (central differences; no second-order graph).
        curvature: "total": where the problem both shapes and reads a lower one, H and M are derivatives of its
            TOTAL gradient; "partial" holds the lower solution fixed there (Betty's rule). Equal everywhere else.
        batch: the batch at which the pullback is taken: the "last" one the problem trained on, or a "fresh" one.
        radius: 2-norm of a finite difference's perturbation; None chooses by dtype.

    Raises:
        ConfigError: an argument is none of its choices.

    Cost: see the solver, plus one cross product.

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
    last: SolveResult | None = field(default=None, init=False, repr=False)
    habit: Habit = field(default_factory=Habit, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for key in ("product", "curvature", "batch"):
            value, choices = getattr(self, key), get_args(self.__annotations__[key])
            if value not in choices:
                raise ConfigError(
                    f"hypergradient.{key}: found {value!r}; expected one of {', '.join(choices)}."
                    f"{did_you_mean(str(value), choices)} Correct hypergradient.{key}."
                )
        if self.radius is not None and not self.radius > 0:
            raise ConfigError(
                f"hypergradient.radius: found {self.radius}; expected a positive norm or null. "
                "Leave it out to choose by dtype."
            )

    def solution(self, lower_loss: LowerLoss, inputs: Vector) -> tuple[Tensor, ...]:
        """Return theta*_l with the pullback as its backward."""
        outputs: tuple[Tensor, ...] = Solution.apply(_ImplicitPullback(self, lower_loss), *inputs)
        return outputs

    def check(self, problem: str, *, is_nested: bool, is_differentiated: bool) -> None:
        """Refuse finite differences where the pullback is differentiated, or the stationarity is a total one."""
        if self.product == "finite_difference" and (is_nested or is_differentiated):
            reason = (
                f"'{problem}' both shapes and reads a lower problem, so its stationarity contains that one's solution"
                if is_nested
                else f"a problem above '{problem}' both shapes and reads it, so its pullback is differentiated"
            )
            raise ConfigError(
                f"problems.{problem}.hypergradient.product: found finite_difference, but {reason}; expected reverse. "
                f"Write +hypergradient@problems.{problem}.hypergradient=cg, or set curvature: partial on the problem "
                "that both shapes and reads."
            )

    def statistics(self) -> dict[str, float]:
        """Return the last solve's residual and number of products, where the solver knows them."""
        if self.last is None or self.last.residual is None:
            return {}
        return {"solver_residual": self.last.residual, "solver_products": float(self.last.num_products)}

    def record(self, problem: str, result: SolveResult) -> None:
        """Keep a solve's result, and warn the first time it failed."""
        failures = (Status.NEGATIVE_CURVATURE, Status.SINGULAR, Status.NON_FINITE)
        if result.status in failures and (self.last is None or self.last.status is not result.status):
            warnings.warn(
                f"The {type(self.solver).__name__} solve at problem '{problem}' ended with {result.status.value} after "
                f"{result.num_products} products; the best vector so far is used. Raise the solver's damping, or "
                "lower its step_size.",
                stacklevel=2,
            )
        self.last = result


class _ImplicitPullback:
    """The pullback of one solution node; its evaluations share their random numbers."""

    def __init__(self, settings: Implicit, lower_loss: LowerLoss) -> None:
        self.settings = settings
        self.solver = settings.solver
        self._unpaired = lower_loss
        self._paired = _Paired(lower_loss)
        self.lower_loss = replace(lower_loss, function=self._paired)

    def first_order(self, theta: Vector, inputs: Vector, wanted: Sequence[bool], cotangent: Vector) -> list[Tensor]:
        """Return `-M^T H^-1 v` for the wanted inputs."""
        # Without a differentiated pullback before it there is one evaluation, or a difference that pairs its own.
        loss = self.lower_loss if self._paired.is_used else self._unpaired
        product = self._product(loss, theta, inputs, wanted)
        solution = self._solve(product, self._unpaired.reduce(cotangent))
        return list(torch._foreach_neg(product.cross(solution)))

    def solve(self, theta: Vector, inputs: Vector, vector: Vector) -> list[Tensor]:
        """Return `H^-1 v`."""
        return self._solve(
            self._product(self.lower_loss, theta, inputs, [False] * len(inputs)), self.lower_loss.reduce(vector)
        )

    def _product(self, lower_loss: LowerLoss, theta: Vector, inputs: Vector, wanted: Sequence[bool]) -> AbstractProduct:
        if self.settings.product == "finite_difference":
            settings = self.settings
            return FiniteDifferenceProduct(lower_loss, theta, inputs, wanted, settings.radius, settings.habit)
        return ReverseProduct(lower_loss, theta, inputs, wanted)

    def _solve(self, product: AbstractProduct, vector: Vector) -> list[Tensor]:
        reduce = self.lower_loss.reduce
        result = self.solver.solve(lambda direction: reduce(product.hessian(direction)), vector)
        self.settings.record(self.lower_loss.problem, result)
        return result.solution


class _Paired:
    """A loss that draws the same random numbers each time."""

    def __init__(self, lower_loss: LowerLoss) -> None:
        self._loss = lower_loss
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
