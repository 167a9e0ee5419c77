"""Whether the graphs of recorded steps are kept until the backward pass: by what they take, which is measured once.

Keeping a graph must change no bit of the training. Some functions of torch (SiLU, GroupNorm) have one backward for
gradients with a graph and another one without: their gradients differ in the last bits. So both are compared as well.
"""

import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from mlotool.hypergradient.functional_steps import batch_gradient
from mlotool.hypergradient.vector import leaves
from mlotool.problem.interface import LowerView, Vector
from mlotool.problem.trajectory import StepRecord
from mlotool.problem.unroll import Unroll

_log = logging.getLogger("mlotool")


class UnrolledState(NamedTuple):
    """What is kept from one pullback to the next.

    Args:
        keeps_graphs: with `remat: auto`, what the first pullback has decided; None before it.

    Example:
        >>> UnrolledState().keeps_graphs is None
        True
    """

    keeps_graphs: bool | None = None


class Measured(NamedTuple):
    """What one step shows about the graph of its gradient.

    Args:
        size: bytes that the graph holds.
        is_exact: whether the gradient with a graph is, bit by bit, the one without.

    Example:
        >>> Measured(size=1000, is_exact=True).size
        1000
    """

    size: int
    is_exact: bool


def fit(unroll: Unroll, inputs: Vector, view: LowerView, budget: int) -> bool:
    """Return whether the graphs of all recorded steps can be kept on every rank, and log the figure.

    Args:
        unroll: with the recorded steps, at least one.
        inputs: what shapes the problem.
        view: of the problem.
        budget: bytes.

    Cost: two gradients, one of them with its graph.

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
    count, ranks = len(unroll.records), view.problem.rank_mean
    try:
        size, is_exact = measure(unroll, unroll.records[-1], inputs, view)
    except RuntimeError as error:
        # Transforms of torch.func refuse the hooks. An error of the loss itself returns when the step is taken again.
        fits, why = False, f"what their graphs take cannot be measured ({str(error).partition(chr(10))[0]})"
    else:
        fits, why = count * size <= budget and is_exact, _figures(count, count * size, budget)
        if not is_exact:
            why = "with a graph its gradient is rounded otherwise; remat=false keeps graphs all the same"
    # A mean of flags: where it is not zero, some rank cannot keep its graphs, and all decide alike.
    is_kept = not bool(ranks.mean([torch.tensor(float(not fits), device=view.theta[0].device)])[0] > 0)
    if fits and not is_kept:
        why += " on this rank, but not on all"
    what = "keeps the graphs of its steps" if is_kept else "computes its steps again in the backward pass"
    _log.info("problems.%s.hypergradient %s: %s.", view.problem.name, what, why)
    return is_kept


def measure(unroll: Unroll, record: StepRecord, inputs: Vector, view: LowerView) -> Measured:
    """Take a step's gradient with its graph, and without, and return what that shows.

    The graph holds the storages of the tensors that autograd saves, and copies of the parameters, of what shapes them
    and of the gradient. Batches, and parameters and buffers of the module, are there anyhow.

    Args:
        unroll: of the problem.
        record: the step; the random numbers go on as if it had not been taken again.
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
        >>> measure(Unroll((), True, (), loss, *[None] * 5), record, [torch.ones(2)], view).is_exact
        True
    """
    theta, points = leaves(record.theta), leaves(inputs)
    module = view.problem.module
    there: list[Any] = [*theta, *points, *tree_leaves([batch for batch, _ in record.draws])]
    if module is not None:
        there += [*module.parameters(), *module.buffers()]
    known = {_place(each) for each in there if isinstance(each, Tensor)}
    sizes: dict[tuple[torch.device, int], int] = {}

    def pack(tensor: Tensor) -> Tensor:
        place = _place(tensor)
        if place not in known:
            sizes[place] = tensor.untyped_storage().nbytes()
        # Not the tensor itself: saved with its own node it would never be freed.
        return tensor.detach()

    def gradients(*, create_graph: bool) -> list[tuple[Tensor | None, ...]]:
        found = []
        for batch, random in record.draws:
            with random.replayed():
                slopes = batch_gradient(
                    view, unroll, batch, record.lower_snapshots, theta, points, create_graph=create_graph
                )
            found.append(slopes)
        return found

    # All graphs are held until the end: of memory that was freed, another tensor may have the place.
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = gradients(create_graph=True)
    plain = gradients(create_graph=False)
    is_exact = all(
        _equal(a, b) for one, other in zip(kept, plain, strict=True) for a, b in zip(one, other, strict=True)
    )
    copied = sum(each.untyped_storage().nbytes() for each in (*theta, *theta, *points))
    return Measured(sum(sizes.values()) + copied, is_exact)


def _figures(count: int, size: int, budget: int) -> str:
    return f"{count} of them take {size / 2**20:.4g} MiB, of a graph_budget of {budget / 2**20:.4g} MiB"


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


def _place(tensor: Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()
