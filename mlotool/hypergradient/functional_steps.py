"""A problem's optimizer steps taken on a copy, and the gradients of steps that were recorded."""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mlotool.core.gradient import dense
from mlotool.core.not_differentiable import explained
from mlotool.core.replay import RandomState
from mlotool.core.twice_differentiable import twice_differentiable
from mlotool.hypergradient.vector import leaves
from mlotool.problem.interface import LowerView, Unroll, Vector
from mlotool.problem.optimizers.rule import State
from mlotool.problem.rank_mean import mean_gradient
from mlotool.problem.trajectory import LowerSnapshots, StepRecord


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
    unroll: Unroll,
    record: StepRecord,
    theta: Vector,
    inputs: Vector,
    view: LowerView,
    *,
    create_graph: bool,
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
    ranks, found = view.problem.rank_mean, []
    with torch.enable_grad():
        at = ranks.shared(theta) if create_graph else theta
        for batch, as_then in record.evaluations(view.problem.module):
            with as_then:
                found.append(
                    batch_gradient(view, unroll, batch, record.lower_snapshots, at, inputs, create_graph=create_graph)
                )
        return mean_gradient(found, theta, ranks)


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
