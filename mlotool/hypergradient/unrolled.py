"""Differentiation through the optimizer's steps, in reverse.

With `remat: auto` graphs of recorded steps are kept where they fit into a budget, and where a comparison shows no
difference in any bit: some functions of torch (SiLU, GroupNorm) have one backward for gradients with a graph and
another one without, and all steps of an unroll that a resumed run finds begun are computed again.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from mlotool.core.arguments import require
from mlotool.core.forward_mode import explained, twice_differentiable
from mlotool.core.gradient import dense, pulled_back
from mlotool.core.private import tree_flatten, tree_leaves, tree_unflatten
from mlotool.core.replay import RandomState
from mlotool.core.settings import Count, Whole, target
from mlotool.core.tangents import in_dual_level
from mlotool.core.tracing import is_tracing
from mlotool.hypergradient.products.forward import chosen_product, moving_gradient, random_direction, takes_forward
from mlotool.hypergradient.vector import add, aliases, chosen, constants, leaves, vector_jacobian
from mlotool.problem.interface import AbstractStepwise, LowerView, Unroll, Vector
from mlotool.problem.optimizers.rule import COUNTER, State, StepCotangents
from mlotool.problem.rank_mean import RankMean, mean_gradient
from mlotool.problem.trajectory import AbstractStepStore, KeepAll, StepRecord, middle

_log = logging.getLogger("mlotool")


def simulate(
    unroll: Unroll,
    inputs: Vector,
    view: LowerView,
    begin: tuple[Vector, Sequence[State]] | None = None,
    *,
    keeps_gradients: bool = False,
    connected_from: int | None = None,
) -> tuple[tuple[StepRecord, ...], tuple[Tensor, ...], tuple[State, ...]]:
    """Take the steps of `unroll.batches` on a copy; return their records, and parameters and state after them.

    Args:
        unroll: of the problem.
        inputs: what shapes it, detached; where steps are connected, leaves of their graph.
        view: of the problem.
        begin: the parameters and state before them; None is where the problem is.
        keeps_gradients: whether the records have the gradients.
        connected_from: number of the first step of those that are one graph, up to the last; None: there is none.

    Example:
        >>> import torch
        >>> from mlotool.problem.interface import LowerProblem
        >>> loss = lambda theta, inputs: ((theta[0] - inputs[0]) ** 2).sum()
        >>> view = LowerView(LowerProblem("w"), (torch.tensor([2.0]),), loss)
        >>> unroll = Unroll(
        ...     records=(), has_all=True, batches=((None,),),
        ...     own_loss=lambda theta, inputs, batch, lower: loss(theta, inputs),
        ...     step=lambda theta, gradient, state, rates, inputs: ([theta[0] - rates[0]["lr"] * gradient[0]], state),
        ...     step_pullback=None, start=None, begin=lambda: ((torch.tensor([2.0]),), ({},)),
        ...     hyperparameters=lambda count: [({"lr": 0.1},)] * count,
        ... )
        >>> records, theta, state = simulate(unroll, [torch.tensor([1.0])], view)
        >>> theta, records[0].theta
        ((tensor([1.8000]),), (tensor([2.]),))
    """
    theta, state = unroll.begin() if begin is None else begin
    records, ranks = list[StepRecord](), view.problem.rank_mean
    if unroll.start is not None:
        with torch.set_grad_enabled(connected_from == 0):
            theta = unroll.start(inputs)
    for batches, hyperparameters in zip(unroll.batches, unroll.hyperparameters(len(unroll.batches)), strict=True):
        draws, slopes = [], []
        is_connected = connected_from is not None and len(records) >= connected_from
        # A gradient is taken at an alias: the start may be a view that several parameters share.
        at = [x.view_as(x) if is_connected and x.requires_grad else x.detach().requires_grad_() for x in theta]
        shared = ranks.shared(at) if is_connected else at
        for batch in batches:
            # For the first time: the generator moves on from batch to batch.
            draws.append((batch, RandomState(view.devices)))
            loss = partial(unroll.own_loss, shared, inputs, batch, {})
            slopes.append(batch_gradient(view, loss, shared, create_graph=is_connected))
        with torch.enable_grad():
            gradient = mean_gradient(slopes, theta, ranks)
        kept = tuple(gradient) if keeps_gradients else None
        records.append(StepRecord(tuple(theta), tuple(state), hyperparameters, tuple(draws), {}, gradient=kept))
        with torch.set_grad_enabled(is_connected):
            theta, state = unroll.step(at, gradient, state, hyperparameters, inputs)
    return tuple(records), tuple(theta), tuple(state)


def step_gradients(
    unroll: Unroll, record: StepRecord, theta: Vector, inputs: Vector, view: LowerView, *, create_graph: bool
) -> list[Tensor | None]:
    """Return the gradient of a step, the mean over its batches and over ranks, as are all derivatives of it.

    It is that of the step: its random numbers are drawn again, and buffers are as they were.

    A parameter that no batch's loss depends on has None as its mean, as for the optimizer.

    Example:
        >>> import torch
        >>> from mlotool.problem.interface import LowerProblem
        >>> loss = lambda theta, inputs, batch, lower: ((theta[0] - inputs[0]) ** 2).sum()
        >>> view = LowerView(LowerProblem("w"), (torch.tensor([2.0]),), loss)
        >>> unroll, theta = Unroll((), True, (), loss, *[None] * 5), [torch.tensor([2.0], requires_grad=True)]
        >>> record = StepRecord((), (), (), ((None, RandomState(())),), {})
        >>> step_gradients(unroll, record, theta, [torch.tensor([1.0])], view, create_graph=False)
        [tensor([2.])]
    """
    ranks = view.problem.rank_mean
    with torch.enable_grad():
        at = ranks.shared(theta) if create_graph else theta
        gradients = batch_gradients(unroll, record, at, inputs, view, create_graph=create_graph)
        return mean_gradient(gradients, theta, ranks)


def batch_gradients(
    unroll: Unroll, record: StepRecord, theta: Vector, inputs: Vector, view: LowerView, *, create_graph: bool
) -> list[tuple[Tensor | None, ...]]:
    """Return the gradients on this rank's part of each batch of a step; arguments as for `step_gradients`."""
    gradients = []
    for batch, as_then in record.evaluations(view.problem.module):
        loss = partial(unroll.own_loss, theta, inputs, batch, record.lower_snapshots)
        with as_then:
            gradients.append(batch_gradient(view, loss, theta, create_graph=create_graph))
    return gradients


def batch_gradient(
    view: LowerView, evaluate: Callable[[], Tensor], theta: Vector, *, create_graph: bool
) -> tuple[Tensor | None, ...]:
    """Return the gradient on this rank's part of one batch, one tensor per parameter; None where it is unused.

    Args:
        view: of the problem.
        evaluate: returns the loss at theta.
        theta: one tensor per parameter.
        create_graph: make the result differentiable.

    Example:
        >>> import torch
        >>> from mlotool.problem.interface import LowerProblem
        >>> theta = [torch.tensor([2.0], requires_grad=True)]
        >>> view = LowerView(LowerProblem("w"), theta, None)
        >>> batch_gradient(view, lambda: ((theta[0] - 1.0) ** 2).sum(), theta, create_graph=False)
        (tensor([2.]),)
    """
    name, traits = view.problem.name, view.problem.traits
    with torch.enable_grad():
        loss = twice_differentiable(name, traits, view.devices, evaluate) if create_graph else evaluate()
        with explained(name, "reverse") if create_graph else nullcontext():
            return dense(torch.autograd.grad(loss, list(theta), create_graph=create_graph, allow_unused=True))


# One for each tensor; None is zero, of which nothing is allocated.
Cotangents = Sequence[Tensor | None]


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

    def own_loss(self, batch: object, theta: Vector, inputs: Vector) -> Tensor:
        """Return the loss of the step on one of its batches, on this rank's part."""
        return self.unroll.own_loss(theta, inputs, batch, self.record.lower_snapshots)

    def gradient(self) -> list[Tensor | None]:
        """Return the mean gradient over batches and ranks, one tensor per parameter, without a graph.

        It is computed again where it was not kept, and where it is still to be compared with the one that was taken.

        Raises:
            ConfigError: it is another one.
        """
        kept, taken = self.record.gradient, self.record.taken
        if kept is not None and (taken is None or not taken.is_open):
            return list(kept)
        gradient = self.mean_gradient(leaves(self.record.theta), self.inputs, create_graph=False)
        return gradient if kept is None else list(kept)

    def mean_gradient(self, theta: Vector, inputs: Vector, *, create_graph: bool) -> list[Tensor | None]:
        """Return the gradient as a function of tensors that have the values of the step.

        Raises:
            ConfigError: it is not the gradient that was taken, where that is known.
        """
        gradient = step_gradients(self.unroll, self.record, theta, inputs, self.view, create_graph=create_graph)
        if self.record.taken is not None:
            self.record.taken.compare(gradient, self.view.problem.name, self.view.problem.precision)
        return gradient


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
        """Return `H u`, a tensor per parameter, and `M^T u`, a tensor per wanted input; None is zero. The last call.

        On several ranks `H u` is the mean over them, and `M^T u` this rank's part.

        Args:
            vector: u, one tensor per parameter; None where the gradient is.
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
            self._theta, points = leaves(record.theta), leaves(step.inputs, step.wanted)
            self._mean = step.mean_gradient(self._theta, points, create_graph=True)
        else:
            self._theta, self._mean, points = record.graph.theta, record.graph.mean, record.graph.inputs
        self._sources = chosen(points, step.wanted)
        self.gradient = [None if slope is None else slope.detach() for slope in self._mean]

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
            pulled = pulled_back(slopes, targets, cotangents, retain=self._is_kept)
        return pulled[:count] or [None] * len(self._theta), pulled[count:]


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
        self.gradient = step.gradient()
        self._step = step

    def pull(self, vector: Cotangents, *, needs_theta: bool) -> tuple[Cotangents, Cotangents]:
        """Return `H u` and `M^T u`."""
        step, record, problem, count = self._step, self._step.record, self._step.view.problem, len(vector)
        points, tangents = [*constants(record.theta), *constants(step.inputs)], [*vector, *[None] * len(step.inputs)]
        wanted, moved = [*[needs_theta] * count, *step.wanted], list[Cotangents]()
        for batch, as_then in record.evaluations(problem.module):

            def loss(points: Vector, batch: Any = batch) -> Tensor:
                return step.own_loss(batch, points[:count], points[count:])

            with as_then:
                of_batch = moving_gradient(
                    loss, points, tangents, wanted, problem=problem.name, is_nested=problem.is_nested
                )
            moved.append(of_batch[1])
        # An input that the loss does not depend on has no product, rather than zeros of its size.
        mean = mean_gradient(moved, chosen(points, wanted), RankMean())
        if not needs_theta:
            return [None] * count, mean
        return problem.rank_mean.gradient(mean[:count], record.theta), mean[count:]


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


# Parameters and optimizer state before a step.
Point = tuple[Vector, Sequence[State]]


class StoredSteps:
    """The recorded steps of an unroll, each whole when it is asked for.

    Args:
        store: says how many checkpoints may be held.
        unroll: of the problem, with its records.
        view: likewise.
        inputs: what shapes it.

    Example:
        >>> from mlotool.problem.interface import LowerProblem
        >>> from mlotool.problem.trajectory import KeepAll
        >>> record = StepRecord((torch.ones(2),), ({},), (), (), {})
        >>> unroll = Unroll((record,), True, (), None, *[None] * 5)
        >>> steps = StoredSteps(KeepAll(), unroll, LowerView(LowerProblem("w"), (), None), [])
        >>> [each.theta for each in steps.backwards(0)]
        [(tensor([1., 1.]),)]
    """

    def __init__(self, store: AbstractStepStore, unroll: Unroll, view: LowerView, inputs: Vector) -> None:
        self._store = store
        self._unroll = unroll
        self._view = view
        self._inputs = [tensor.detach() for tensor in inputs]
        self._records = unroll.records

    def backwards(self, first: int) -> Iterator[StepRecord]:
        """Yield the steps from the last one to the `first`."""
        kept = [number for number, record in enumerate(self._records) if record.is_checkpoint]
        end = len(self._records)
        for count in range(len(kept), 0, -1):
            begin = kept[count - 1]
            free = self._store.num_free(end - begin, count)
            yield from self._between(begin, end, self._kept(begin), free, first)
            end = begin
            if begin <= first:
                return

    def at(self, number: int) -> StepRecord:
        """Return one step."""
        begin = max(step for step in range(number + 1) if self._records[step].is_checkpoint)
        return self._whole(number, self._forward(begin, number, self._kept(begin)))

    def last(self) -> tuple[LowerView, AbstractContextManager[None]]:
        """Return the problem as the last step saw it, on one of its batches, with what that depends on as it was."""
        record = self.at(len(self._records) - 1)
        step = self._step(record)
        # A loss that is another function each time would be told of its tangents.
        step.gradient()
        batch, as_then = next(record.evaluations(self._view.problem.module))
        return replace(self._view, theta=record.theta, own_loss=partial(step.own_loss, batch)), as_then

    def _between(self, begin: int, end: int, point: Point, free: int, first: int) -> Iterator[StepRecord]:
        """Yield the steps of a part from its last one, with `free` checkpoints beside that at its beginning."""
        while end - begin > 1 and end - 1 > first:
            if free == 0:
                end -= 1
                yield self._whole(end, self._forward(begin, end, point))
                continue
            split = begin + middle(end - begin, free)
            yield from self._between(split, end, self._forward(begin, split, point), free - 1, first)
            end = split
        if begin >= first:
            yield self._whole(begin, point)
        elif end - 1 >= first:
            yield self._whole(end - 1, self._forward(begin, end - 1, point))

    def _forward(self, begin: int, end: int, point: Point) -> Point:
        """Return parameters and state after the steps from `begin` up to `end`, which are taken again."""
        for number in range(begin, end):
            record = self._whole(number, point)
            gradient = self._step(record).gradient()
            assert self._unroll.replay is not None
            with torch.no_grad():
                point = self._unroll.replay(record.theta, gradient, record.state, record.hyperparameters, self._inputs)
        return point

    def _step(self, record: StepRecord) -> RecordedStep:
        return RecordedStep(self._unroll, self._view, record, self._inputs, [False] * len(self._inputs))

    def _kept(self, number: int) -> Point:
        record = self._on_device(self._records[number])
        return record.theta, record.state

    def _whole(self, number: int, point: Point) -> StepRecord:
        record = self._on_device(self._records[number])
        return record if record.theta is point[0] else replace(record, theta=tuple(point[0]), state=tuple(point[1]))

    def _on_device(self, record: StepRecord) -> StepRecord:
        return record.on(self._view.theta[0].device) if self._store.offload else record


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
        graph: leaves that have the inputs' values, and the parameters as their function, where the steps are one graph.

    Example:
        Two steps `theta - 0.1 theta x` from 2 at x = 1 lead to `2 (1 - 0.1 x)^2`, of which the derivative is -0.36.

        >>> from mlotool.core.replay import RandomState
        >>> from mlotool.problem.interface import LowerProblem
        >>> from mlotool.problem.trajectory import KeepAll
        >>> from mlotool.problem.optimizers.sgd import SGD_RULE
        >>> from mlotool.problem.optimizers.rule import StepArguments, pull_back
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
    graph: tuple[Vector, tuple[Tensor, ...]] | None = None

    @property
    def reaches_start(self) -> bool:
        """Whether the cotangents go on through what the unroll starts from."""
        return self.unroll.start is not None and self.is_whole

    def first_order(
        self, theta: Vector, inputs: Vector, wanted: Sequence[bool], cotangent: list[Tensor]
    ) -> list[Tensor]:
        """Return the cotangents of the wanted inputs.

        The list of the given ones is emptied, unless the steps are one graph: they need not live as long as the pass.
        """
        if self.graph is not None:
            points, outputs = self.graph
            with explained(self.view.problem.name, "reverse"):
                return vector_jacobian(outputs, chosen(points, wanted), cotangent)
        total: list[Tensor | None] = [None for flag in wanted if flag]
        adjoint = [*cotangent]
        cotangent.clear()
        of_state: list[dict[str, Tensor]] = [{} for _ in adjoint]
        numbers = range(len(self.unroll.records) - 1, self.first - 1, -1)
        for number, record in zip(numbers, self.steps.backwards(self.first), strict=True):
            product = self.product(RecordedStep(self.unroll, self.view, record, inputs, wanted))
            cotangents, of_settings = self._through_update(record, product.gradient, inputs, wanted, adjoint, of_state)
            adjoint, vector, factor = cotangents.theta, cotangents.gradient, cotangents.factor
            # Nothing leads on from the state at the first step.
            of_state = cotangents.state if number > self.first else []
            total = plus(total, of_settings)
            # Nothing is held twice while the products are taken, where memory is at its peak.
            del cotangents, of_settings
            needs_theta = number > self.first or self.reaches_start
            of_theta, of_inputs = product.pull(vector, needs_theta=needs_theta)
            total = plus(total, of_inputs, factor)
            del product, vector, of_inputs
            if needs_theta:
                _add_to(adjoint, [*of_theta], factor)
            del of_theta
        if self.reaches_start:
            assert self.unroll.start is not None
            points = leaves(inputs, wanted)
            with torch.enable_grad():
                start = self.unroll.start(points)
            total = plus(total, _pulled([*start], chosen(points, wanted), [*adjoint]))
        return [
            torch.zeros_like(source) if slope is None else slope
            for source, slope in zip(chosen(inputs, wanted), total, strict=True)
        ]

    def differentiable(self, theta: Vector, inputs: Vector, wanted: Sequence[bool], cotangent: Vector) -> list[Tensor]:
        """Return the same as functions of the inputs: the steps are taken again, in one graph."""
        shared = aliases(inputs)
        begin = self.steps.at(self.first)
        point: Vector = leaves(begin.theta)
        if self.reaches_start:
            assert self.unroll.start is not None
            point = self.unroll.start(shared)
        state: Sequence[State] = begin.state
        for record in self.unroll.records[self.first :]:
            # A gradient is taken at an alias: the start may be a view that several parameters share.
            at = aliases(point)
            gradient = step_gradients(self.unroll, record, at, shared, self.view, create_graph=self.is_second_order)
            point, state = self.unroll.step(at, gradient, state, record.hyperparameters, shared)
        return vector_jacobian(point, chosen(shared, wanted), cotangent, create_graph=True)

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
            step = self.unroll.step_pullback(
                record.theta, mean, record.state, record.hyperparameters, adjoint, of_state
            )
            return step, [None for flag in wanted if flag]
        points = leaves(inputs, wanted)
        # Counters of steps are constants.
        own = [{key: value for key, value in state.items() if key != COUNTER} for state in record.state]
        held, shape = tree_flatten((list(record.theta), list(mean), own))
        moving = [None if tensor is None else tensor.detach().requires_grad_() for tensor in held]
        before, gradient, state = tree_unflatten(moving, shape)
        state = [{**then, **values} for then, values in zip(record.state, state, strict=True)]
        with torch.enable_grad():
            after, new_state = self.unroll.step(before, gradient, state, record.hyperparameters, points)
        outputs = [*after, *(new[key] for new, slopes in zip(new_state, of_state, strict=True) for key in slopes)]
        cotangents = [*adjoint, *(slope for slopes in of_state for slope in slopes.values())]
        sources = [tensor for tensor in moving if tensor is not None]
        pulled = _pulled(outputs, [*sources, *chosen(points, wanted)], cotangents)
        slopes = (torch.zeros_like(x) if slope is None else slope for x, slope in zip(sources, pulled, strict=False))
        step = StepCotangents(*tree_unflatten([None if x is None else next(slopes) for x in moving], shape))
        return step, pulled[len(sources) :]


def _add_to(adjoint: list[Tensor], slopes: list[Tensor | None], factor: float) -> None:
    """Add to an adjoint, parameter by parameter, so that only one of them is held twice."""
    for position in range(len(adjoint)):
        slope, slopes[position] = slopes[position], None
        if slope is not None:
            adjoint[position] = torch.add(adjoint[position], slope, alpha=factor)


def _pulled(outputs: Sequence[Tensor], sources: Sequence[Tensor], cotangents: Sequence[Tensor]) -> Cotangents:
    """Return the cotangents of sources; None where no output depends on one."""
    pairs = [(y, v) for y, v in zip(outputs, cotangents, strict=True) if y.requires_grad]
    if not pairs or not sources:
        return [None] * len(sources)
    return pulled_back([y for y, _ in pairs], sources, [v for _, v in pairs])


def fit(unroll: Unroll, inputs: Vector, view: LowerView, budget: int) -> bool:
    """Return whether the graphs of all steps of an unroll can be kept on every rank, and log the figure.

    Args:
        unroll: with recorded steps, at least one; where there are fewer than an unroll has, its number counts.
        inputs: what shapes the problem.
        view: of the problem.
        budget: bytes.

    Cost: two gradients a step, one of them with its graph.

    Example:
        >>> from mlotool.core.replay import RandomState
        >>> from mlotool.problem.interface import LowerProblem
        >>> loss = lambda theta, inputs, batch, lower: (theta[0] * inputs[0]).exp().sum()
        >>> view = LowerView(LowerProblem("w"), (torch.ones(2),), loss)
        >>> step = StepRecord((torch.ones(2),), (), (), ((None, RandomState(())),), {})
        >>> unroll = Unroll((step, step), True, (), loss, *[None] * 5)
        >>> fit(unroll, [torch.ones(2)], view, budget=1000), fit(unroll, [torch.ones(2)], view, budget=10)
        (True, False)
    """
    count, ranks = max(len(unroll.records), unroll.num_steps), view.problem.rank_mean
    try:
        size, is_exact = measure(unroll, inputs, view)
    except RuntimeError as error:
        # Transforms of torch.func refuse the hooks. An error of the loss itself returns when the step is taken again.
        fits, why = False, f"the memory of their graphs cannot be measured ({str(error).partition(chr(10))[0]})"
    else:
        fits = count * size <= budget and is_exact
        why = f"{count} graphs take {count * size / 2**20:.4g} MiB, with a graph_budget of {budget / 2**20:.4g} MiB"
        if not is_exact:
            why = "gradients with a graph have other rounding errors; remat=false keeps the graphs anyway"
    is_kept = not ranks.any([not fits], view.theta[0].device)[0]
    if fits and not is_kept:
        why += " on this rank, but not on all"
    what = "keeps the graphs of its steps" if is_kept else "computes its steps again in the backward pass"
    _log.info("problems.%s.hypergradient %s: %s.", view.problem.name, what, why)
    return is_kept


def measure(unroll: Unroll, inputs: Vector, view: LowerView) -> tuple[int, bool]:
    """Return the bytes of the largest graph of a step's gradient, and whether the gradient is the same without one.

    Each step is looked at, bit by bit. A graph holds the storages of the tensors that autograd
    saves, and copies of the parameters, of what shapes them and of the gradient. Batches and modules are there anyhow.

    All are taken near the step: where a gradient is zero (below a last layer that begins at zero), its bits would be
    equal by accident.

    Args:
        unroll: of the problem, with its records.
        inputs: what shapes the problem.
        view: of the problem.

    Raises:
        RuntimeError: the loss does what hooks on saved tensors do not go with.

    Example:
        >>> from mlotool.core.replay import RandomState
        >>> from mlotool.problem.interface import LowerProblem
        >>> loss = lambda theta, inputs, batch, lower: (theta[0] * inputs[0]).exp().sum()
        >>> view = LowerView(LowerProblem("w"), (torch.ones(2),), loss)
        >>> record = StepRecord((torch.ones(2),), (), (), ((None, RandomState(())),), {})
        >>> measure(Unroll((record,), True, (), loss, *[None] * 5), [torch.ones(2)], view)[1]
        True
    """
    largest, is_exact, points = 0, True, leaves(_near(inputs))
    held = [tensor for module in unroll.modules for tensor in (*module.parameters(), *module.buffers())]
    for record in unroll.records:
        theta = leaves(_near(record.theta))
        there = tree_leaves([*theta, *points, *held, *(batch for batch, _ in record.draws)])
        known, sizes = {_place(tensor) for tensor in there if isinstance(tensor, Tensor)}, dict[Any, int]()

        def pack(tensor: Tensor, known: set[Any] = known, sizes: dict[Any, int] = sizes) -> Tensor:
            if (place := _place(tensor)) not in known:
                sizes[place] = tensor.untyped_storage().nbytes()
            # Not the tensor itself: saved with its own node it would never be freed.
            return tensor.detach()

        # All graphs are held until the end: of memory that was freed, another tensor may have the place.
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            kept = batch_gradients(unroll, record, theta, points, view, create_graph=True)
        plain = batch_gradients(unroll, record, theta, points, view, create_graph=False)
        pairs: list[Any] = [pair for both in zip(kept, plain, strict=True) for pair in zip(*both, strict=True)]
        is_exact = is_exact and all(a is b or torch.equal(a, b) for a, b in pairs)
        copies = sum(tensor.untyped_storage().nbytes() for tensor in (*theta, *theta, *points))
        largest = max(largest, sum(sizes.values()) + copies)
    return largest, is_exact


def _near(tensors: Vector) -> list[Tensor]:
    still = constants(tensors)
    return add(still, random_direction(still), 0.01) if still else []


def _place(tensor: Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()


@target("hypergradient")
@dataclass(frozen=True)
class Unrolled(AbstractStepwise):
    """Unrolling: reverse differentiation through the optimizer steps that led to the current parameters (ITD, RMAD).

        theta_t+1, s_t+1 = update(grad C_l(theta_t, x), theta_t, s_t, h(x)),   theta_0 = theta_0(x)
        from the cotangent of theta_K, for t = K-1, ..., 0: the cotangents of theta_t, s_t and x

    s is the optimizer's state and h its hyperparameters. A cotangent of a tensor is the derivative of the upper loss
    with respect to it.

    The steps are those that the problem has taken since a problem above it last stepped, with the batches, random
    numbers, learning rates and optimizer states that they had. An upper problem can shape the steps through the loss,
    through their initial parameters (`reset_to`) and through the optimizer's hyperparameters (`optimizer.lr`).

    The graph of each step's gradient is either kept until the backward pass (`remat: false`), or the gradient is
    computed again there (`remat: true`). The second way takes 1.6 to 2 times as long and needs the memory of one step's
    graph, and of the parameters and optimizer state of all steps. The results are equal up to rounding, and a step that
    is computed again sees the module's buffers as they were. In the first unroll, the second, the fourth and so on, the
    gradient that is computed again is compared with the one of the step. This finds losses that are not pure functions;
    it is left out for losses that read solutions.

    If the steps read solutions of problems further below, gradients pass on through these solutions as they were at
    each step. Then every step is computed again, and the memory includes what those solutions need (all of their steps,
    if they are unrolled too).

    Args:
        horizon: how many of the last steps are differentiated (truncated unrolling, T1-T2); None takes all.
        remat: true computes the gradient of each step again in the backward pass. false keeps the graph of each step,
            which saves one gradient per step and holds the activations of all steps in memory. "auto" keeps the graphs
            if they fit into `graph_budget` and give bit-identical gradients (modules with SiLU or GroupNorm do not).
            The first hypergradient decides: it multiplies the size of the largest graph of a step by the number of
            steps, compares the gradients with and without a graph, and logs the choice, which is also kept in
            checkpoints. Later batches are assumed not to be larger. Graphs are never kept for steps before that, for
            steps that read solutions, and for traced steps (for which "auto" chooses nothing).
        graph_budget: for `remat: auto`, the most memory for the graphs of a problem's steps, in bytes.
        second_order: false treats the gradients of the steps as constants (first-order MAML). What remains are the
            paths through the initial parameters, the momentum and the hyperparameters.
        product: how a step's gradient is differentiated; all choices are exact. "reverse": double backward. "forward":
            forward mode over reverse mode, which needs no graph of the gradient: memory of about one gradient with
            tangents, and of the gradient of each step. "auto": "forward" if blocks of the problem's module are
            evaluated again (the problem's setting `remat`), else "reverse".
        trajectory: what is kept of the steps until they are differentiated: `KeepAll` (parameters and optimizer state
            of all steps), `KeepEvery` (those of every k-th step, and the gradients of all steps) or `Binomial` (a fixed
            number of checkpoints). The rest is computed again, bit by bit the same.

    Raises:
        ConfigError: a setting is out of range, the problem's optimizer is not SGD, Adam or AdamW, or a step that is
            computed again has another gradient than before.

    Cost: per step, one Hessian-vector product and one gradient (none with `remat: false`); memory of `horizon` copies
    of the parameters and the optimizer state.

    Source: Franceschi et al. 2017 (arXiv 1703.01785), algorithm 1; Shaban et al. 2019 (arXiv 1810.10667).

    Example:
        >>> from mlotool import Unrolled
        >>> Unrolled(horizon=2).horizon
        2
    """

    horizon: Count | None = None
    remat: bool | Literal["auto"] = True
    graph_budget: Whole = 2**30
    second_order: bool = True
    product: Literal["reverse", "forward", "auto"] = "reverse"
    trajectory: AbstractStepStore = field(default_factory=KeepAll)

    def __post_init__(self) -> None:
        keeps_none = self.product == "forward" or not self.trajectory.is_whole
        expected = "true, since no graphs are kept with product: forward or a trajectory that does not keep all steps"
        require(self.remat is True or not keeps_none, "hypergradient.remat", self.remat, expected)

    @property
    def keeps_graphs(self) -> bool:  # type: ignore[override]
        """Whether graphs are kept, however much memory they take."""
        return self.remat is False and self.second_order

    def records_graphs(self, state: bool | None) -> bool:
        """Return whether the graph of the next step is kept."""
        return self.keeps_graphs or (self.remat == "auto" and state is True)

    def saves_gradients(self, prefers_forward: bool) -> bool:
        """Return whether the gradient of a step is kept, which forward mode needs."""
        is_forward = takes_forward(self._setting, prefers_forward, is_nested=False)
        return (is_forward and self.trajectory.is_whole) or self.trajectory.saves_gradients

    @property
    def is_traceable(self) -> bool:  # type: ignore[override]
        """Whether a trace holds for later steps: not with forward mode, which is compared with double backward."""
        return self.product == "reverse"

    @property
    def pushes_solutions(self) -> bool:  # type: ignore[override]
        """Whether the steps are differentiated along directions."""
        return self.product == "forward" and self.second_order

    def pullback(self, view: LowerView, inputs: Vector) -> ReversePass:
        """Return the backward pass through the steps that were taken, or that are taken here."""
        unroll = view.unroll
        assert unroll is not None
        num_steps = len(unroll.records or unroll.batches)
        first = 0 if self.horizon is None else max(0, num_steps - self.horizon)
        graph = None
        if unroll.records:
            records, theta = unroll.records, view.theta
            is_open = self.remat == "auto" and self.second_order and view.problem.memory.value is None
            # Steps that read solutions, or that are traced, keep no graph.
            if is_open and not (view.problem.is_nested or unroll.is_traced or is_tracing()):
                view.problem.memory.value = fit(unroll, inputs, view, self.graph_budget)
        else:
            problem = view.problem
            prefers_forward = problem.has_blocks and not problem.is_nested and not problem.traits.lacks_tangents
            keeps_gradients = self.saves_gradients(prefers_forward)
            is_connected = self.records_graphs(problem.memory.value) and not (problem.is_nested or is_tracing())
            points, connected_from = (leaves(inputs), first) if is_connected else (constants(inputs), None)
            records, theta, _ = simulate(
                unroll, points, view, keeps_gradients=keeps_gradients, connected_from=connected_from
            )
            graph = (points, theta) if is_connected else None
        taken = replace(unroll, records=records)
        steps = StoredSteps(self.trajectory, taken, view, inputs)
        kind = self._product(steps, view, inputs)
        is_whole = unroll.has_all and first == 0
        return ReversePass(kind, self.second_order, view, taken, steps, first, is_whole, tuple(constants(theta)), graph)

    @property
    def _setting(self) -> str:
        """How gradients are differentiated; graphs that are kept are those of double backward."""
        return "reverse" if self.remat is not True or not self.second_order else self.product

    def _product(self, steps: StoredSteps, view: LowerView, inputs: Vector) -> type[AbstractStepProduct]:
        if not self.second_order:
            return FirstOrderStep
        if not takes_forward(self._setting, view.problem.has_blocks, view.problem.is_nested):
            return ReverseStepProduct
        if view.problem.traits.has_compared_product or in_dual_level():
            kind = chosen_product(self._setting, view, view.theta, inputs, ())
        else:
            there, as_then = steps.last()
            with as_then:
                kind = chosen_product(self._setting, there, there.theta, inputs, [True] * len(inputs))
        return ForwardStepProduct if kind == "forward" else ReverseStepProduct

    def state_dict(self, state: bool | None) -> dict[str, Any]:
        """Return the choice of `remat: auto`, if the first hypergradient has made it."""
        return {} if state is None else {"keeps_graphs": state}

    def load_state(self, saved: dict[str, Any]) -> bool | None:
        """Return the choice that was saved."""
        return saved.get("keeps_graphs")
