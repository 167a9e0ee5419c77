"""Whether the graphs of recorded steps are kept until the backward pass: found out once, with `remat: auto`.

They are kept where they fit into a budget, and where a comparison shows no difference in any bit. There are two reasons
for a difference:

- Rounding. Some functions of torch (SiLU, GroupNorm) have one backward for gradients with a graph and another one
  without, which differ in the last bits.
- Buffers. A graph that is kept has read the buffers as they were at its step. A step that is computed again reads them
  as they are now, but for those of the problem's own module that moved in the steps before it, which are put back. (All
  steps of an unroll that a resumed run finds begun are computed again.)
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mlotool.core.slots import Slots
from mlotool.hypergradient.functional_steps import batch_gradient
from mlotool.hypergradient.vector import leaves
from mlotool.problem.interface import LowerView, Unroll, Vector
from mlotool.problem.trajectory import StepRecord

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
    """What recorded steps show about the graphs of their gradients.

    Args:
        size: bytes that the largest graph of a step holds.
        is_exact: whether the gradient with a graph is, bit by bit, the one without a graph and at other buffers.

    Example:
        >>> Measured(size=1000, is_exact=True).size
        1000
    """

    size: int
    is_exact: bool


def fit(unroll: Unroll, inputs: Vector, view: LowerView, budget: int) -> bool:
    """Return whether the graphs of all steps of an unroll can be kept on every rank, and log the figure.

    Args:
        unroll: with recorded steps, at least one; where there are fewer than an unroll has, its number counts.
        inputs: what shapes the problem.
        view: of the problem.
        budget: bytes.

    Cost: two gradients, one of them with its graph; one more with its graph for each further shape of batches.

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
        fits, why = False, f"what their graphs take cannot be measured ({str(error).partition(chr(10))[0]})"
    else:
        fits, why = count * size <= budget and is_exact, _figures(count, count * size, budget)
        if not is_exact:
            why = "their gradient is rounded otherwise with a graph, or depends on buffers; remat=false keeps it anyway"
    is_kept = not ranks.any([not fits], view.theta[0].device)[0]
    if fits and not is_kept:
        why += " on this rank, but not on all"
    what = "keeps the graphs of its steps" if is_kept else "computes its steps again in the backward pass"
    _log.info("problems.%s.hypergradient %s: %s.", view.problem.name, what, why)
    return is_kept


def measure(unroll: Unroll, inputs: Vector, view: LowerView) -> Measured:
    """Take gradients of recorded steps with their graphs, one for each shape of batches, and one without.

    A graph holds the storages of the tensors that autograd saves, and copies of the parameters, of what shapes them
    and of the gradient. Batches, and parameters and buffers of the modules, are there anyhow.

    All are taken near the step: where a gradient is zero (below a last layer that begins at zero), its bits would be
    equal by accident. Parameters, buffers and random numbers are afterwards as they were.

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
        >>> measure(Unroll((record,), True, (), loss, *[None] * 5), [torch.ones(2)], view).is_exact
        True
    """
    near = disturbed(inputs)
    size, largest, kept = -1, unroll.records[-1], []
    for record in _of_each_shape(unroll.records):
        taken, gradients = _with_graph(unroll, record, near, view)
        if taken > size:
            size, largest, kept = taken, record, gradients
    theta, points = leaves(disturbed(largest.theta)), leaves(near)
    with _disturbed_buffers(unroll.modules):
        plain = _gradients(unroll, largest, theta, points, view, create_graph=False)
    return Measured(size, all(_equal(a, b) for a, b in zip(kept, plain, strict=True)))


def disturbed(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors near others, the same each time: about a hundredth of their rms away, and 1e-3.

    Numbers that are counted (0-D integers) go on by one; other integers, such as indices, stay.

    Args:
        tensors: any; they stay as they are, and so do torch's random numbers.

    Example:
        >>> disturbed([torch.zeros(2, dtype=torch.int64), torch.tensor(4)])
        [tensor([0, 0]), tensor(5)]
        >>> bool((disturbed([torch.zeros(2)])[0] != 0).all())
        True
    """
    found = []
    for number, tensor in enumerate(tensors):
        there = tensor.detach()
        if there.is_floating_point() or there.is_complex():
            generator = torch.Generator(there.device).manual_seed(number)
            noise = torch.randn(there.shape, generator=generator, dtype=there.dtype, device=there.device)
            scale = there.abs().float().square().mean().sqrt() / 100 + 1e-3
            found.append(there + (scale * noise).to(there.dtype))
        else:
            is_count = there.ndim == 0 and there.dtype != torch.bool
            found.append(there + 1 if is_count else there.clone())
    return found


def _with_graph(unroll: Unroll, record: StepRecord, near: Vector, view: LowerView) -> tuple[int, list[Tensor | None]]:
    """Return how many bytes the graph of a step's gradient holds, and the gradient."""
    theta, points = leaves(disturbed(record.theta)), leaves(near)
    there: list[Any] = [*theta, *points, *tree_leaves([batch for batch, _ in record.draws])]
    for module in unroll.modules:
        there += [*module.parameters(), *module.buffers()]
    known = {_place(each) for each in there if isinstance(each, Tensor)}
    sizes: dict[tuple[torch.device, int], int] = {}

    def pack(tensor: Tensor) -> Tensor:
        place = _place(tensor)
        if place not in known:
            sizes[place] = tensor.untyped_storage().nbytes()
        # Not the tensor itself: saved with its own node it would never be freed.
        return tensor.detach()

    # All graphs are held until the end: of memory that was freed, another tensor may have the place.
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = _gradients(unroll, record, theta, points, view, create_graph=True)
    copied = sum(each.untyped_storage().nbytes() for each in (*theta, *theta, *points))
    return sum(sizes.values()) + copied, [None if each is None else each.detach() for each in kept]


def _gradients(
    unroll: Unroll, record: StepRecord, theta: Vector, points: Vector, view: LowerView, *, create_graph: bool
) -> list[Tensor | None]:
    """Return the gradients on all batches of a step, one after the other."""
    found: list[Tensor | None] = []
    for batch, as_then in record.evaluations(view.problem.module):
        with as_then:
            found += batch_gradient(
                view, unroll, batch, record.lower_snapshots, theta, points, create_graph=create_graph
            )
    return found


@contextmanager
def _disturbed_buffers(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Put disturbed copies into the places of all buffers, for a while; what was there is never written to."""
    slots = [Slots(module, ()) for module in modules]
    own = [each.buffers() for each in slots]
    try:
        for each, buffers in zip(slots, own, strict=True):
            each.put_buffers(disturbed(buffers))
        yield
    finally:
        for each, buffers in zip(slots, own, strict=True):
            each.put_buffers(buffers)


def _of_each_shape(records: Sequence[StepRecord]) -> list[StepRecord]:
    """Return the last record for each combination of shapes that its batches have."""
    return list({_shapes(record): record for record in records}.values())


def _shapes(record: StepRecord) -> tuple[Any, ...]:
    parts = tree_leaves([batch for batch, _ in record.draws])
    return tuple(each.shape if isinstance(each, Tensor) else None for each in parts)


def _figures(count: int, size: int, budget: int) -> str:
    return f"{count} of them take {size / 2**20:.4g} MiB, of a graph_budget of {budget / 2**20:.4g} MiB"


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


def _place(tensor: Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()
