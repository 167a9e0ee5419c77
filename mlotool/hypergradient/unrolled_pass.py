"""The reverse pass through the optimizer steps of an unroll: the pullback of `Unrolled`."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mlotool.core.gradient import pulled_back
from mlotool.hypergradient.functional_steps import step_gradients
from mlotool.hypergradient.step_products import AbstractStepProduct, Cotangents, RecordedStep, plus
from mlotool.hypergradient.stored_steps import StoredSteps
from mlotool.hypergradient.vector import leaves, vector_jacobian
from mlotool.problem.interface import LowerView, Unroll, Vector
from mlotool.problem.optimizers.rule import COUNTER, State, StepCotangents
from mlotool.problem.trajectory import StepRecord


@dataclass
class ReversePass:
    """The pullback of one solution.

    Args:
        product: makes the gradient of a step with its second-order products.
        is_second_order: whether the gradients of the steps are differentiated.
        view: of the problem.
        unroll: what its steps are.
        steps: those that were taken, whole when they are asked for.
        first: number of the first one that is differentiated.
        is_whole: whether that is the first one of the unroll.
        outputs: the parameters after them.

    Example:
        Two steps `theta - 0.1 theta x` from 2 at x = 1 lead to `2 (1 - 0.1 x)^2`, of which the derivative is -0.36.

        >>> from mlotool.core.replay import RandomState
        >>> from mlotool.hypergradient.step_products import ReverseStepProduct
        >>> from mlotool.problem.interface import LowerProblem
        >>> from mlotool.problem.step_store import KeepAll
        >>> from mlotool.problem.optimizers.rule import StepArguments, pull_back
        >>> from mlotool.problem.optimizers.sgd import SGD_RULE
        >>> loss = lambda theta, inputs, batch, lower: (theta[0].square() * inputs[0]).sum() / 2
        >>> rates = (dict(torch.optim.SGD([torch.zeros(1)], lr=0.1).defaults),)
        >>> back = lambda theta, slope, state, rates, *cotangents: pull_back(
        ...     StepArguments(SGD_RULE, theta, slope, state, rates), *cotangents
        ... )
        >>> draw = (None, RandomState())
        >>> records = tuple(StepRecord((torch.tensor([x]),), ({},), rates, (draw,), {}) for x in (2.0, 1.8))
        >>> view = LowerView(LowerProblem("w"), (torch.tensor([1.62]),), loss)
        >>> unroll = Unroll(records, True, (), loss, None, back, None, None, None)
        >>> steps = StoredSteps(KeepAll(), unroll, view, [torch.ones(1)])
        >>> whole = ReversePass(ReverseStepProduct, True, view, unroll, steps, 0, True, view.theta)
        >>> whole.first_order(view.theta, [torch.ones(1)], [True], [torch.ones(1)])
        [tensor([-0.3600])]
    """

    product: type[AbstractStepProduct]
    is_second_order: bool
    view: LowerView
    unroll: Unroll
    steps: StoredSteps
    first: int
    is_whole: bool
    outputs: tuple[Tensor, ...]

    @property
    def reaches_start(self) -> bool:
        """Whether the cotangents go on through what the unroll starts from."""
        return self.unroll.start is not None and self.is_whole

    def first_order(
        self, theta: Vector, inputs: Vector, wanted: Sequence[bool], cotangent: list[Tensor]
    ) -> list[Tensor]:
        """Return the cotangents of the wanted inputs.

        The list of the given ones is emptied: they need not live as long as the pass.
        """
        total: list[Tensor | None] = [None for flag in wanted if flag]
        adjoint = [*cotangent]
        cotangent.clear()
        of_state: list[dict[str, Tensor]] = [{} for _ in adjoint]
        numbers = range(len(self.unroll.records) - 1, self.first - 1, -1)
        for number, record in zip(numbers, self.steps.backwards(self.first), strict=True):
            product = self.product(RecordedStep(self.unroll, self.view, record, inputs, wanted))
            found, of_settings = self._through_update(record, product.gradient, inputs, wanted, adjoint, of_state)
            adjoint, vector, factor = found.theta, found.gradient, found.factor
            # Nothing leads on from the state at the first step.
            of_state = found.state if number > self.first else []
            total = plus(total, of_settings)
            # Nothing is held twice while the products are taken, where memory is at its peak.
            del found, of_settings
            needs_theta = number > self.first or self.reaches_start
            of_theta, of_inputs = product.pull(vector, needs_theta=needs_theta)
            total = plus(total, of_inputs, factor)
            del product, vector, of_inputs
            if needs_theta:
                _add_to(adjoint, [*of_theta], factor)
            del of_theta
        if self.reaches_start:
            assert self.unroll.start is not None
            points = leaves(inputs, tuple(wanted))
            with torch.enable_grad():
                start = self.unroll.start(points)
            total = plus(total, _pulled([*start], _chosen(points, wanted), [*adjoint]))
        return [
            torch.zeros_like(source) if each is None else each
            for source, each in zip(_chosen(inputs, wanted), total, strict=True)
        ]

    def differentiable(self, theta: Vector, inputs: Vector, wanted: Sequence[bool], cotangent: Vector) -> list[Tensor]:
        """Return the same as functions of the inputs: the steps are taken again, in one graph."""
        aliases = [tensor.view_as(tensor) for tensor in inputs]
        begin = self.steps.at(self.first)
        point: Vector = [tensor.detach().requires_grad_() for tensor in begin.theta]
        if self.reaches_start:
            assert self.unroll.start is not None
            point = self.unroll.start(aliases)
        state: Sequence[State] = begin.state
        for record in self.unroll.records[self.first :]:
            # A gradient is taken at an alias: the start may be a view that several parameters share.
            at = [tensor.view_as(tensor) for tensor in point]
            gradient = step_gradients(self.unroll, record, at, aliases, self.view, create_graph=self.is_second_order)
            point, state = self.unroll.step(at, gradient, state, record.hyperparameters, aliases)
        return vector_jacobian(point, _chosen(aliases, wanted), cotangent, create_graph=True)

    def _through_update(
        self,
        record: StepRecord,
        mean: Cotangents,
        inputs: Vector,
        wanted: Sequence[bool],
        adjoint: list[Tensor],
        of_state: list[dict[str, Tensor]],
    ) -> tuple[StepCotangents, Cotangents]:
        """Return the cotangents of what an update starts from, and of the inputs that shape its settings.

        The lists of the given cotangents are taken over, as by `mlotool.problem.optimizers.rule.pull_back`.
        """
        if self.unroll.step_pullback is not None:
            found = self.unroll.step_pullback(
                record.theta, mean, record.state, record.hyperparameters, adjoint, of_state
            )
            return found, [None for flag in wanted if flag]
        points = leaves(inputs, tuple(wanted))
        gradient = [None if each is None else each.detach().requires_grad_() for each in mean]
        state = [
            {key: value if key == COUNTER else value.detach().requires_grad_() for key, value in each.items()}
            for each in record.state
        ]
        with torch.enable_grad():
            before = leaves(record.theta)
            after, new_state = self.unroll.step(before, gradient, state, record.hyperparameters, points)
        outputs, cotangents = list(after), list(adjoint)
        for each, slope in zip(new_state, of_state, strict=True):
            for key, value in slope.items():
                outputs.append(each[key])
                cotangents.append(value)
        present = [each for each in gradient if each is not None]
        held = [value for each in state for key, value in each.items() if key != COUNTER]
        own = [*before, *present, *held]
        pulled = _pulled(outputs, [*own, *_chosen(points, wanted)], cotangents)
        whole = iter([torch.zeros_like(x) if each is None else each for x, each in zip(own, pulled, strict=False)])
        step = StepCotangents(
            [next(whole) for _ in before],
            [None if each is None else next(whole) for each in gradient],
            [{key: next(whole) for key in each if key != COUNTER} for each in state],
        )
        return step, pulled[len(own) :]


def _add_to(adjoint: list[Tensor], found: list[Tensor | None], factor: float) -> None:
    """Add to an adjoint, parameter by parameter, so that only one of them is held twice."""
    for position in range(len(adjoint)):
        each, found[position] = found[position], None
        if each is not None:
            adjoint[position] = torch.add(adjoint[position], each, alpha=factor)


def _chosen(tensors: Vector, flags: Sequence[bool]) -> list[Tensor]:
    return [tensor for tensor, flag in zip(tensors, flags, strict=True) if flag]


def _pulled(outputs: Sequence[Tensor], sources: Sequence[Tensor], cotangents: Sequence[Tensor]) -> Cotangents:
    """Return the cotangents of sources; None where no output depends on one."""
    pairs = [(y, v) for y, v in zip(outputs, cotangents, strict=True) if y.requires_grad]
    if not pairs or not sources:
        return [None] * len(sources)
    return pulled_back([y for y, _ in pairs], sources, [v for _, v in pairs])
