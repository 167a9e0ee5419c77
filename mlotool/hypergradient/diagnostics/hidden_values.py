"""Whether a loss hides values from automatic differentiation that finite differences see all the same.

`x.detach()`, `x.data`, `x.item()` and what is computed under `torch.no_grad()` are constants for double backward, but
move with the parameters in a finite difference. Each product is taken twice by finite differences, with those values
free and held, at the same radius and on the same random numbers: what sets the two apart can be nothing else, neither
rounding nor a kink of the loss. Double backward is not asked: it may fail, and behind a function that is differentiable
once it is silently zero.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mlotool.core.rematerialization import without_remat
from mlotool.core.replay import LossTraits, RandomState, outside_replay
from mlotool.core.tracing import is_tracing
from mlotool.hypergradient.products import FiniteDifferenceProduct
from mlotool.hypergradient.vector import apart, leaves, norm
from mlotool.problem.interface import LowerView, Vector

TOLERANCE = 0.1
"""Share of a product that may come from hidden values before there is a warning."""

_HIDING = frozenset(
    {torch.detach, Tensor.detach, Tensor.data.__get__, Tensor.item, Tensor.tolist, Tensor.__float__}  # type: ignore[attr-defined]
)
_WARNING = (
    "problems.{problem}.loss: {share:.0%} of a finite difference comes from values that the loss hides from automatic "
    "differentiation (detach, data, item or torch.no_grad) though they depend on the parameters of '{problem}'; "
    "expected that both take them for constants. Write mlotool.stop_gradient(x) in place of x.detach(), or choose a "
    "hypergradient with product: reverse."
)


def warn_of_hidden_values(
    view: LowerView,
    theta: Vector,
    inputs: Vector,
    wanted: Sequence[bool],
    direction: Vector,
    *,
    radius: float | None = None,
    with_hessian: bool = False,
) -> None:
    """Warn where finite differences of a loss are not those of its automatic derivatives; once a problem.

    Random numbers go on as if nothing had been. Losses evaluated by `torch.vmap` (tasks) are not judged.

    Args:
        view: the loss.
        theta: the point.
        inputs: what theta*_l depends on.
        wanted: which of the inputs want a cotangent.
        direction: of the products; nothing is learned from zero, so the next call tries again.
        radius: of the finite differences.
        with_hessian: whether the pullback takes products with H, beside those with M.

    Example:
        >>> import torch, warnings
        >>> from mlotool.problem.interface import LowerProblem
        >>> loss = lambda theta, inputs: (theta[0].detach() * theta[0] * inputs[0]).sum()
        >>> theta, inputs = [torch.tensor([2.0])], [torch.tensor([1.0])]
        >>> view = LowerView(LowerProblem("w"), tuple(theta), loss)
        >>> with warnings.catch_warnings(record=True) as found:
        ...     warnings.simplefilter("always")
        ...     warn_of_hidden_values(view, theta, inputs, [True], direction=[torch.ones(1)])
        >>> str(found[0].message)[:90]
        'problems.w.loss: 50% of a finite difference comes from values that the loss hides from aut'
    """
    # The solutions inside a loss are detached by the program itself.
    traits = view.problem.traits
    if traits.has_searched_hidden_values or is_tracing() or view.problem.is_nested:
        return
    if not 0 < float(norm(direction)) < math.inf:
        return
    traits.has_searched_hidden_values = True
    share = _hidden_share(view, theta, inputs, wanted, direction, radius, with_hessian)
    if share > TOLERANCE:
        warnings.warn(_WARNING.format(problem=view.problem.name, share=share), stacklevel=2)


def _hidden_share(
    view: LowerView,
    theta: Vector,
    inputs: Vector,
    wanted: Sequence[bool],
    direction: Vector,
    radius: float | None,
    with_hessian: bool,
) -> float:
    held, random = _Held(view), RandomState(view.devices)

    def products(function: Callable[[Vector, Vector], Tensor]) -> list[list[Tensor]]:
        random.restore()
        # What is found out about a loss with held values says nothing of the loss itself.
        loss = replace(view, own_loss=function, problem=replace(view.problem, traits=LossTraits()))
        product = FiniteDifferenceProduct(loss, theta, inputs, wanted, radius)
        curved = [product.own_hessian(direction)] if with_hessian else []
        return [*curved, product.cross(direction)]

    # What a compiled module does inside cannot be watched, nor what `remat` does in a backward pass.
    with random.replayed(), torch.compiler.set_stance("force_eager"), without_remat():
        try:
            held.record(leaves(theta), leaves(inputs, tuple(wanted)))
            return max(map(apart, products(view.own_loss), products(held))) if held.values else 0.0
        except (_OtherValuesError, torch.OutOfMemoryError):
            # The latter where there is no room for a loss without `remat`.
            return 0.0


class _OtherValuesError(Exception):
    """A loss hides more values at perturbed parameters than at the unperturbed ones."""


class _Held:
    """A loss whose hidden values are those of one evaluation.

    Args:
        view: the loss.
    """

    def __init__(self, view: LowerView) -> None:
        self._loss = view
        self.values: list[Any] = []

    def record(self, theta: Vector, inputs: Vector) -> None:
        """Take the values from an evaluation."""
        # Here a stop_gradient is a detach like any other.
        with torch.enable_grad(), outside_replay(), _Interception(None) as found:
            self._loss.own_loss(theta, inputs)
        self.values = found.values

    def __call__(self, theta: Vector, inputs: Vector) -> Tensor:
        with outside_replay(), _Interception(self.values):
            return self._loss.own_loss(theta, inputs)


class _Interception(TorchFunctionMode):
    """Records what a loss hides, or puts recorded values in its place.

    Args:
        values: in the order of the calls; None records.
    """

    def __init__(self, values: list[Any] | None) -> None:
        super().__init__()
        self.values: list[Any] = []
        self._given = None if values is None else iter(values)
        self._is_blocked = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call `func`; return what it returns, or what it returned before."""
        result = func(*args, **(kwargs or {}))
        if func is torch._C._set_grad_enabled:
            self._is_blocked = not args[0]
        if not self._hides(func, args, result):
            return result
        if self._given is None:
            self.values.append(_copied(result))
            return result
        try:
            return _copied(next(self._given))
        except StopIteration:
            raise _OtherValuesError from None

    def _hides(self, func: Any, args: tuple[Any, ...], result: Any) -> bool:
        # The forward pass of an autograd.Function hides nothing: it runs without gradients, but without no_grad too.
        self._is_blocked = self._is_blocked and not torch.is_grad_enabled()
        if not torch.is_grad_enabled() and not self._is_blocked:
            return False
        if not isinstance(result, Tensor):
            return func in _HIDING
        # A tensor of torch.vmap has no value outside of it; a step in place must not be undone.
        if torch._C._functorch.is_functorch_wrapped_tensor(result) or any(result is each for each in args):
            return False
        return func in _HIDING or (self._is_blocked and result.is_floating_point())


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
