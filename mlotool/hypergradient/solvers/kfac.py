"""Gauss-Newton curvature and its Kronecker factors; these need the extra `curvature`."""

import copy
import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mlotool.core.arguments import require
from mlotool.core.errors import ConfigError
from mlotool.core.replay import RandomState
from mlotool.core.settings import Count, NonNegative, Positive, target
from mlotool.hypergradient.solvers import base
from mlotool.hypergradient.solvers.base import AbstractSolver, Matvec, SolveResult, Start, Status, View
from mlotool.hypergradient.solvers.conjugate_gradient import ConjugateGradient
from mlotool.hypergradient.vector import scaled, vector_jacobian
from mlotool.problem.interface import LowerView, Vector
from mlotool.spaces.shared.shared_space import SharedSpace


@target("solver")
@dataclass(frozen=True)
class KFAC(AbstractSolver):
    """The Gauss-Newton matrix in place of the Hessian: K-FAC, EKFAC, or the matrix itself.

        q = (G + damping I)^-1 v

    G is the generalized Gauss-Newton matrix of the network, or its approximation by Kronecker factors.

    G is that of the mean loss of `module(batch[input_key])` against `batch[target_key]`. Other parts of the problem's
    loss, such as weights per sample or a weight decay, are left out: G approximates the largest part of H. It is
    positive semidefinite.

    Args:
        damping: number that is added to the diagonal of G.
        kind: "kfac" (one Kronecker product per layer), "ekfac" (K-FAC with corrected eigenvalues), or "ggn" (G itself,
            inverted by conjugate gradient). The first two need the extra `curvature`.
        loss: the loss that G belongs to: "cross_entropy" or "mean_squared_error".
        input_key: key of the batch for the module's input.
        target_key: key of the batch for the targets.
        max_iterations: for "ggn", the most iterations of conjugate gradient.
        tolerance: for "ggn", the relative residual at which conjugate gradient stops.

    Raises:
        ConfigError: for "kfac" and "ekfac", the extra `curvature` is not installed, or a trained parameter is in a
            layer other than Linear and Conv2d; the batch lacks a key; or the problem has `tasks`.

    Cost: no Hessian-vector product. "kfac" and "ekfac": one backward pass per output of the module, the eigenvalues of
    two factors per layer, and a copy of the module. "ggn": about three gradients per iteration.

    Source: Martens & Grosse 2015 (arXiv 1503.05671); George et al. 2018 (arXiv 1806.03884); the factors by curvlinops.

    Example:
        >>> KFAC(damping=0.1, kind="ekfac").loss
        'cross_entropy'
    """

    damping: Positive = 0.001
    kind: Literal["kfac", "ekfac", "ggn"] = "kfac"
    loss: Literal["cross_entropy", "mean_squared_error"] = "cross_entropy"
    input_key: str = "input"
    target_key: str = "target"
    max_iterations: Count = 20
    tolerance: NonNegative = 1e-6
    needs_products = False
    is_differentiable = False
    failures = base.with_not_finite(
        # G + damping I is positive definite but for rounding.
        NEGATIVE_CURVATURE="The iterate before, or a step along v, is used. Raise damping.",
        SINGULAR="The iterate before, or a step along v, is used. Raise damping.",
    )

    def check(self, problem: str, num_tasks: int | None) -> None:
        """Refuse a task axis, and kinds whose extra is missing."""
        key, advice = f"problems.{problem}.tasks", "Use hypergradient=cg, which solves for each task."
        require(num_tasks is None, key, num_tasks, "null with KFAC", advice)
        if self.kind != "ggn":
            _import()

    def solve(self, matvec: Matvec, vector: Vector, *, start: Start = None, view: View = None) -> SolveResult:
        """Return the product of the inverse with `v`."""
        module, data = self._problem(view)
        assert view is not None
        # Neither its buffers nor its hooks nor the random numbers are to move: a copy, and the state set back.
        random = RandomState(view.devices)
        try:
            with torch.enable_grad(), _quiet():
                result = self._invert(module, data, [tensor.detach() for tensor in vector], view)
        except NotImplementedError as error:
            raise ConfigError(
                f"problems.{view.problem.name}.hypergradient.solver: KFAC(kind={self.kind!r}) found a module without "
                f"factors ({error}); expected every trained parameter in a Linear or Conv2d layer. Set kind: ggn, or "
                "freeze the others."
            ) from error
        finally:
            random.restore()
        return base.finished(vector, result.solution, None, residual=result.residual, status=result.status)

    def _invert(self, module: nn.Module, data: tuple[Tensor, Tensor], vector: Vector, view: LowerView) -> SolveResult:
        parameters = [tensor for tensor in module.parameters() if tensor.requires_grad]
        loss = nn.CrossEntropyLoss() if self.loss == "cross_entropy" else nn.MSELoss()
        if self.kind == "ggn":
            product = gauss_newton(module, loss, parameters, data)
            mean = view.mean_of(lambda direction: scaled(product(direction), view.own_weight))
            return ConjugateGradient(self.max_iterations, self.tolerance, self.damping).solve(mean, vector)
        curvature = _import()
        make = curvature.KFACLinearOperator if self.kind == "kfac" else curvature.EKFACLinearOperator
        options = {"fisher_type": curvature.FisherType.TYPE2, "separate_weight_and_bias": False}
        operator = make(module, loss, parameters, [data], num_data=len(data[0]), check_deterministic=False, **options)
        inverse = curvature.KFACInverseLinearOperator(operator, damping=self.damping, use_exact_damping=True)

        # Of several ranks, each has the factors of its own part of the batch, and none may go its own way.
        solution = view.mean_of(lambda v: [part.detach() for part in inverse @ list(v)])(vector)
        return SolveResult([q.reshape(v.shape) for q, v in zip(solution, vector, strict=True)], Status.FIXED, 0)

    def _problem(self, view: View) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
        """Return a copy of the module, and its inputs and targets."""
        if view is None or view.problem.module is None:
            raise ConfigError("KFAC: found no module; expected view.problem.module. Use it inside Implicit.")
        key = f"problems.{view.problem.name}"
        is_one = not isinstance(view.problem.module, SharedSpace)
        expected = "a single model with KFAC, as the curvature of a shared space is that of all its paths"
        require(is_one, f"{key}.module", view.problem.module, expected, "Write hypergradient: cg.")
        parts = view.own_batch if isinstance(view.own_batch, dict) else {}
        inputs, targets = parts.get(self.input_key), parts.get(self.target_key)
        if not (isinstance(inputs, Tensor) and isinstance(targets, Tensor)):
            raise ConfigError(
                f"{key}.stream: found a batch with {list(parts)}; expected tensors under {self.input_key!r} and "
                f"{self.target_key!r}. Correct hypergradient.solver.input_key and target_key."
            )
        is_right = self.kind == "ggn" or self.loss == "cross_entropy" or targets.dim() > 1
        expected, advice = "a tensor [samples, outputs]", "Give targets a last axis, or set kind: ggn."
        require(is_right, f"{key}.stream: {self.target_key}", targets, expected, advice)
        module = copy.deepcopy(view.problem.module)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        for parameter, value in zip(trained, view.theta, strict=True):
            parameter.data = value.detach().clone()
        return module, (inputs, targets)


def gauss_newton(
    module: nn.Module, loss: nn.Module, parameters: list[nn.Parameter], data: tuple[Tensor, Tensor]
) -> Matvec:
    """Return `u -> J^T (d^2 loss / d outputs^2) J u`, on one forward pass: one set of random numbers.

    Two reverse passes make `J u`: `J^T p` is linear in p, and its derivative transposed is J. Unlike forward mode, they
    work with normalization in train mode.

    Example:
        >>> module = nn.Linear(1, 1, bias=False)
        >>> data = torch.tensor([[2.0]]), torch.tensor([[1.0]])
        >>> gauss_newton(module, nn.MSELoss(), list(module.parameters()), data)([torch.ones(1, 1)])[0].tolist()
        [[8.0]]
    """
    outputs = module(data[0])
    point = outputs.detach().requires_grad_()
    slope = torch.autograd.grad(loss(point, data[1]), point, create_graph=True)
    probe = torch.zeros_like(outputs, requires_grad=True)
    pulled = vector_jacobian([outputs], parameters, [probe], create_graph=True)

    def matvec(direction: Vector) -> Vector:
        pushed = vector_jacobian(pulled, [probe], direction)
        return vector_jacobian([outputs], parameters, vector_jacobian(slope, [point], pushed))

    return matvec


# Curvlinops uses torch.jit, which warns of its own end.
_quiet = partial(warnings.catch_warnings, action="ignore", category=FutureWarning)


def _import() -> Any:
    try:
        with _quiet():
            import curvlinops
    except ImportError as error:
        raise ConfigError(
            f"hypergradient.solver: found KFAC, but importing curvlinops failed: {error}; expected the extra "
            "'curvature'. Run pip install 'mlotool[curvature]'."
        ) from error
    return curvlinops
