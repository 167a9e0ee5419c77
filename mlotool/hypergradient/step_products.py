"""The gradient of a recorded step, and its second-order products `H u` and `M^T u`, which are taken together."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mlotool.core.gradient import pulled_back
from mlotool.core.not_differentiable import explained
from mlotool.hypergradient.forward_over_reverse import moving_gradient
from mlotool.hypergradient.functional_steps import step_gradients
from mlotool.hypergradient.vector import leaves
from mlotool.problem.interface import LowerView, Unroll, Vector
from mlotool.problem.trajectory import StepRecord

Cotangents = Sequence[Tensor | None]
"""One for each tensor; None is zero, of which nothing is allocated."""


@dataclass(frozen=True)
class RecordedStep:
    """A step that was taken, and with respect to what it is differentiated.

    Args:
        unroll: of the problem.
        view: likewise.
        record: the step.
        inputs: what shapes the problem.
        wanted: which of the inputs want a cotangent.

    Example:
        >>> import torch
        >>> record = StepRecord((torch.ones(1),), (), (), (), {}, gradient=(torch.full((1,), 36.0),))
        >>> step = RecordedStep(None, None, record, [torch.ones(1)], [True])
        >>> step.gradient()
        [tensor([36.])]
    """

    unroll: Unroll
    view: LowerView
    record: StepRecord
    inputs: Vector
    wanted: Sequence[bool]

    def gradient(self) -> list[Tensor | None]:
        """Return the mean gradient over batches and ranks, one tensor a parameter, without a graph."""
        return self.gradient_again() if self.record.gradient is None else list(self.record.gradient)

    def gradient_again(self) -> list[Tensor | None]:
        """Return the same, computed again."""
        return self.mean_gradient(leaves(self.record.theta), self.inputs, create_graph=False)

    def compare(self) -> None:
        """Compare the gradient with the one that was taken, where that is to be done and has not been.

        Raises:
            ConfigError: it is another one.
        """
        if self.record.taken is not None and self.record.taken.is_open:
            self.gradient_again()

    def mean_gradient(self, theta: Vector, inputs: Vector, *, create_graph: bool) -> list[Tensor | None]:
        """Return the gradient as a function of tensors that have the values of the step.

        Raises:
            ConfigError: it is not the gradient that was taken, where that is known.
        """
        found = step_gradients(self.unroll, self.record, theta, inputs, self.view, create_graph=create_graph)
        if self.record.taken is not None:
            self.record.taken.compare(found, self.view.problem.name, self.view.problem.precision)
        return found


class AbstractStepProduct(ABC):
    """Products with the derivatives of a step's mean gradient, on the random numbers of the step.

    Args:
        step: the step.

    Attributes:
        gradient: of the step; None where the loss does not read a parameter.

    Example:
        >>> import torch
        >>> record = StepRecord((torch.ones(1),), (), (), (), {}, gradient=(torch.full((1,), 36.0),))
        >>> step = RecordedStep(None, None, record, [torch.ones(1)], [True])
        >>> ForwardStepProduct(step).gradient
        [tensor([36.])]
    """

    gradient: Cotangents

    @abstractmethod
    def __init__(self, step: RecordedStep) -> None: ...

    @abstractmethod
    def pull(self, vector: Cotangents, *, needs_theta: bool) -> tuple[Cotangents, Cotangents]:
        """Return `H u`, one tensor a parameter, and `M^T u`, one tensor a wanted input; None is zero. The last call.

        On several ranks `H u` is the mean over them, and `M^T u` this rank's part.

        Args:
            vector: u, one tensor a parameter; None where the gradient is.
            needs_theta: whether `H u` is wanted.
        """


class FirstOrderStep(AbstractStepProduct):
    """Takes the gradient for a constant: all products are zero.

    Example:
        >>> import torch
        >>> record = StepRecord((torch.ones(1),), (), (), (), {}, gradient=(torch.full((1,), 36.0),))
        >>> step = RecordedStep(None, None, record, [torch.ones(1)], [True])
        >>> FirstOrderStep(step).pull([torch.ones(1)], needs_theta=True)
        ([None], [None])
    """

    def __init__(self, step: RecordedStep) -> None:
        self.gradient = step.gradient()
        self._num_sources = sum(step.wanted)

    def pull(self, vector: Cotangents, *, needs_theta: bool) -> tuple[Cotangents, Cotangents]:
        """Return nothing."""
        return [None] * len(vector), [None] * self._num_sources


class ReverseStepProduct(AbstractStepProduct):
    """By double backward: the graph of the gradient, kept or made anew, and one pass back through it.

    Example:
        The loss `theta^3 x` at theta = 2 and x = 3 has H = 36 and M = 12.

        >>> import torch
        >>> from mlotool.core.replay import RandomState
        >>> from mlotool.problem.interface import LowerProblem
        >>> loss = lambda theta, inputs, batch, lower: (theta[0] ** 3 * inputs[0]).sum()
        >>> theta, view = (torch.tensor([2.0]),), LowerView(LowerProblem("w"), (), loss)
        >>> record = StepRecord(theta, (), (), ((None, RandomState()),), {})
        >>> step = RecordedStep(Unroll((), True, (), loss, *[None] * 5), view, record, [torch.tensor([3.0])], [True])
        >>> ReverseStepProduct(step).pull([torch.ones(1)], needs_theta=True)
        ([tensor([36.])], [tensor([12.])])
    """

    def __init__(self, step: RecordedStep) -> None:
        record, self._problem = step.record, step.view.problem.name
        self._is_kept = record.graph is not None
        if record.graph is None:
            self._theta, points = leaves(record.theta), leaves(step.inputs, tuple(step.wanted))
            self._mean = step.mean_gradient(self._theta, points, create_graph=True)
        else:
            self._theta, self._mean, points = record.graph.theta, record.graph.mean, record.graph.inputs
        self._sources = [point for point, flag in zip(points, step.wanted, strict=True) if flag]
        self.gradient = [None if each is None else each.detach() for each in self._mean]

    def pull(self, vector: Cotangents, *, needs_theta: bool) -> tuple[Cotangents, Cotangents]:
        """Return `H u` and `M^T u`."""
        pairs = [
            (slope, u)
            for slope, u in zip(self._mean, vector, strict=True)
            if slope is not None and u is not None and slope.requires_grad
        ]
        count = len(self._theta) if needs_theta else 0
        targets = [*self._theta[:count], *self._sources]
        if not pairs or not targets:
            return [None] * len(self._theta), [None] * len(self._sources)
        slopes, cotangents = [slope for slope, _ in pairs], [u for _, u in pairs]
        with explained(self._problem, "reverse"):
            found = pulled_back(slopes, targets, cotangents, retain=self._is_kept)
        return found[:count] or [None] * len(self._theta), found[count:]


class ForwardStepProduct(AbstractStepProduct):
    """By forward mode over reverse mode: no graph of the gradient.

    Example:
        The loss `theta^3 x` at theta = 2 and x = 3 has H = 36 and M = 12.

        >>> import torch
        >>> from mlotool.core.replay import RandomState
        >>> from mlotool.problem.interface import LowerProblem
        >>> loss = lambda theta, inputs, batch, lower: (theta[0] ** 3 * inputs[0]).sum()
        >>> theta, view = (torch.tensor([2.0]),), LowerView(LowerProblem("w"), (), loss)
        >>> record = StepRecord(theta, (), (), ((None, RandomState()),), {})
        >>> step = RecordedStep(Unroll((), True, (), loss, *[None] * 5), view, record, [torch.tensor([3.0])], [True])
        >>> ForwardStepProduct(step).pull([torch.ones(1)], needs_theta=True)
        ([tensor([36.])], [tensor([12.])])
    """

    def __init__(self, step: RecordedStep) -> None:
        if step.record.gradient is not None:
            # No gradient is computed again here, which would show that the loss is another function each time.
            step.compare()
        self.gradient = step.gradient()
        self._step = step

    def pull(self, vector: Cotangents, *, needs_theta: bool) -> tuple[Cotangents, Cotangents]:
        """Return `H u` and `M^T u`."""
        step, record = self._step, self._step.record
        count = len(record.theta)
        total: Cotangents = [None] * (sum(step.wanted) + (count if needs_theta else 0))
        for batch, as_then in record.evaluations(step.view.problem.module):
            with as_then:
                found = moving_gradient(
                    partial(self._loss, batch),
                    [*record.theta, *step.inputs],
                    [*vector, *[None] * len(step.inputs)],
                    [*[needs_theta] * count, *step.wanted],
                    problem=step.view.problem.name,
                    is_nested=step.view.problem.is_nested,
                )[1]
            total = plus(total, found)
        if len(record.draws) > 1:
            total = [None if each is None else each / len(record.draws) for each in total]
        if not needs_theta:
            return [None] * count, total
        ranks = step.view.problem.rank_mean
        if ranks.is_alone:
            return total[:count], total[count:]
        # What is zero on one rank need not be so on another, and all exchange the same tensors.
        whole = [torch.zeros_like(x) if each is None else each for x, each in zip(record.theta, total, strict=False)]
        return ranks.mean(whole), total[count:]

    def _loss(self, batch: object, points: Vector) -> Tensor:
        count = len(self._step.record.theta)
        return self._step.unroll.own_loss(points[:count], points[count:], batch, self._step.record.lower_snapshots)


def plus(a: Cotangents, b: Cotangents, factor: float = 1.0) -> list[Tensor | None]:
    """Return `a + factor b` of cotangents.

    Args:
        a: one for each tensor; None is zero.
        b: likewise.
        factor: of b.

    Example:
        >>> import torch
        >>> plus([torch.ones(1), None], [torch.ones(1), None], 2.0)
        [tensor([3.]), None]
    """
    if factor != 1.0:
        b = [None if y is None else factor * y for y in b]
    return [y if x is None else x if y is None else x + y for x, y in zip(a, b, strict=True)]
