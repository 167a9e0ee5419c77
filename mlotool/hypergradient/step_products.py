"""Optimizer steps on a copy, recorded steps gone back over, and the second-order products of a step's gradient."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mlotool.core.forward_mode import explained, twice_differentiable
from mlotool.core.gradient import dense, pulled_back
from mlotool.core.replay import RandomState
from mlotool.hypergradient.products.forward import moving_gradient
from mlotool.hypergradient.vector import chosen, leaves
from mlotool.problem.interface import LowerView, Unroll, Vector
from mlotool.problem.optimizers.rule import State
from mlotool.problem.rank_mean import mean_gradient
from mlotool.problem.trajectory import AbstractStepStore, LowerSnapshots, StepRecord, middle


def simulate(
    unroll: Unroll,
    inputs: Vector,
    view: LowerView,
    begin: tuple[Vector, Sequence[State]] | None = None,
    *,
    keeps_gradients: bool = False,
) -> tuple[tuple[StepRecord, ...], tuple[Tensor, ...], tuple[State, ...]]:
    """Take the steps of `unroll.batches` on a copy; return their records, and parameters and state after them.

    Args:
        unroll: of the problem.
        inputs: what shapes it, detached.
        view: of the problem.
        begin: the parameters and state before them; None is where the problem is.
        keeps_gradients: whether the records have the gradients.

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
    if unroll.start is not None:
        theta = unroll.start(inputs)
    records = []
    for batches, hyperparameters in zip(unroll.batches, unroll.hyperparameters(len(unroll.batches)), strict=True):
        draws, slopes = [], []
        for batch in batches:
            # For the first time: the generator moves on from batch to batch.
            draws.append((batch, RandomState(view.devices)))
            slopes.append(batch_gradient(view, unroll, batch, {}, leaves(theta), inputs, create_graph=False))
        gradient = mean_gradient(slopes, theta, view.problem.rank_mean)
        kept = tuple(gradient) if keeps_gradients else None
        records.append(StepRecord(tuple(theta), tuple(state), hyperparameters, tuple(draws), {}, gradient=kept))
        with torch.no_grad():
            theta, state = unroll.step(theta, gradient, state, hyperparameters, inputs)
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
        found = batch_gradients(unroll, record, at, inputs, view, create_graph=create_graph)
        return mean_gradient(found, theta, ranks)


def batch_gradients(
    unroll: Unroll, record: StepRecord, theta: Vector, inputs: Vector, view: LowerView, *, create_graph: bool
) -> list[tuple[Tensor | None, ...]]:
    """Return the gradients on this rank's part of each batch of a step; arguments as for `step_gradients`."""
    found, below = [], record.lower_snapshots
    for batch, as_then in record.evaluations(view.problem.module):
        with as_then:
            found.append(batch_gradient(view, unroll, batch, below, theta, inputs, create_graph=create_graph))
    return found


def batch_gradient(
    view: LowerView,
    unroll: Unroll,
    batch: Any,
    lower_snapshots: LowerSnapshots,
    theta: Vector,
    inputs: Vector,
    *,
    create_graph: bool,
) -> tuple[Tensor | None, ...]:
    """Return the gradient on this rank's part of one batch, one tensor a parameter; None where it is unused.

    Arguments as for `step_gradients`, with the batch and the lower problems as the step read them.

    Example:
        >>> import torch
        >>> from mlotool.problem.interface import LowerProblem
        >>> loss = lambda theta, inputs, batch, lower: ((theta[0] - inputs[0]) ** 2).sum()
        >>> view = LowerView(LowerProblem("w"), (torch.tensor([2.0]),), loss)
        >>> unroll, theta = Unroll((), True, (), loss, *[None] * 5), [torch.tensor([2.0], requires_grad=True)]
        >>> batch_gradient(view, unroll, None, {}, theta, [torch.tensor([1.0])], create_graph=False)
        (tensor([2.]),)
    """
    name, traits = view.problem.name, view.problem.traits
    with torch.enable_grad():
        evaluate = partial(unroll.own_loss, theta, inputs, batch, lower_snapshots)
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

    def gradient(self) -> list[Tensor | None]:
        """Return the mean gradient over batches and ranks, one tensor a parameter, without a graph.

        It is computed again where it was not kept, and where it is still to be compared with the one that was taken.

        Raises:
            ConfigError: it is another one.
        """
        kept, taken = self.record.gradient, self.record.taken
        if kept is not None and (taken is None or not taken.is_open):
            return list(kept)
        found = self.mean_gradient(leaves(self.record.theta), self.inputs, create_graph=False)
        return found if kept is None else list(kept)

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
            self._theta, points = leaves(record.theta), leaves(step.inputs, step.wanted)
            self._mean = step.mean_gradient(self._theta, points, create_graph=True)
        else:
            self._theta, self._mean, points = record.graph.theta, record.graph.mean, record.graph.inputs
        self._sources = chosen(points, step.wanted)
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
        self._inputs = [each.detach() for each in inputs]
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
        begin = max(each for each in range(number + 1) if self._records[each].is_checkpoint)
        return self._whole(number, self._forward(begin, number, self._kept(begin)))

    def last(self) -> tuple[LowerView, AbstractContextManager[None]]:
        """Return the problem as the last step saw it, on one of its batches, with what that depends on as it was."""
        record = self.at(len(self._records) - 1)
        # A loss that is another function each time would be told of its tangents.
        self._step(record).gradient()
        batch, as_then = next(record.evaluations(self._view.problem.module))
        own_loss = self._unroll.own_loss

        def loss(theta: Vector, inputs: Vector) -> Tensor:
            return own_loss(theta, inputs, batch, record.lower_snapshots)

        return replace(self._view, theta=record.theta, own_loss=loss), as_then

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
        return replace(self._on_device(self._records[number]), theta=tuple(point[0]), state=tuple(point[1]))

    def _on_device(self, record: StepRecord) -> StepRecord:
        return record.on(self._view.theta[0].device) if self._store.offload else record
