"""Rematerialization: a block's activations are dropped, and computed again where a derivative needs them.

`torch.utils.checkpoint` does the same for a first backward pass only: the activations that it computes again become a
part of the graph of the gradient, and stay there until that graph is differentiated. Here the backward pass of a block
is itself a block: it is evaluated without a graph, and again in its own backward pass, at any order. What a
second-order product holds is then the inputs of the blocks, and the inside of one.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import Function, forward_ad

from mlotool.core.block_call import BlockCall
from mlotool.core.gradient import Recording
from mlotool.core.repeatable import unwatched
from mlotool.core.tangents import any_has_tangent, apart, joined

_Evaluation = Callable[..., Sequence[Tensor | None]]
"""Tensors in, tensors out, the same ones each time; of an argument that is unused, the cotangent is None."""

_REVERSE_OVER_FORWARD = (
    "remat: found a gradient of a tangent (reverse over forward mode); expected tangents of a gradient (forward over "
    "reverse mode), which are the same product. Take the gradient inside, and the tangent of it outside."
)

_IS_PLAIN: ContextVar[bool] = ContextVar("mlotool_plain_remat", default=False)

_in_transform = torch._C._are_functorch_transforms_active


def remat(block: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    """Return `block(*inputs, **options)`, of which only inputs and outputs are kept for derivatives.

    The block is evaluated again in the backward pass, and in the backward pass of that one: a second-order product
    through n blocks holds n inputs and the activations of one block. All evaluations share random numbers, autocast,
    train or eval mode, buffers, and the values behind `stop_gradient`. Where no derivative is asked for, it is a plain
    call. It goes together with double backward, forward mode, `torch.vmap` and `torch.func`, within each other, but for
    reverse over forward mode.

    Args:
        block: a module, or a function of tensors. What it is to be differentiated with respect to is among its
            parameters and inputs. It may change its buffers, which are constants, and none of its inputs.
        inputs: of the block, in any nesting of lists, tuples and dictionaries. The block changes none of them, nor
            what objects among them hold: a cache is refused.
        options: likewise, by name.

    Returns:
        What the block returns. Where inputs or parameters require a gradient, so do all its floating-point results,
        with a gradient of zero of those that the block has detached. What shares memory with an input, a parameter or
        another result is not to be changed in place.

    Raises:
        ConfigError: the block reads a tensor that requires a gradient and is not among its inputs and parameters,
            changes an argument, or is another function when it is evaluated again (`core/repeatable.py`).

    Cost: one more evaluation of the block for each backward pass through it.

    Source: Chen et al. 2016 (arXiv 1604.06174), here for the backward pass of a backward pass too; Kemaev et al. 2025
        (MixFlow-MG), section 4.

    Example:
        >>> layer, x = torch.nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True)
        >>> torch.equal(remat(layer, x), layer(x))
        True
    """
    if _IS_PLAIN.get():
        return block(*inputs, **options)
    with unwatched():
        call, tensors = BlockCall.of(block, inputs, options)
        is_recorded = torch.is_grad_enabled() and (_in_transform() or any(each.requires_grad for each in tensors))
        if is_recorded or any_has_tangent(tensors):
            return call.finish(_evaluate(call, tensors))
    return block(*inputs, **options)


@contextmanager
def without_remat() -> Iterator[None]:
    """Make `remat` a plain call, for who watches what a block does: a later evaluation of it would not be watched."""
    token = _IS_PLAIN.set(True)
    try:
        yield
    finally:
        _IS_PLAIN.reset(token)


def graph_inside(node: Any) -> list[Tensor]:
    """Return what a node of `remat` stands for, with its graph, made again; nothing for any other node.

    Args:
        node: of an autograd graph, outside of `torch.func`.
    """
    if getattr(node, "_forward_cls", None) is not _Remat:
        return []
    points, wanted = node.saved_tensors[: node.count], node.needs_input_grad[2 : 2 + node.count]
    with torch.enable_grad():
        found = node.function(*[x.detach().requires_grad_(flag) for x, flag in zip(points, wanted, strict=True)])
    return [each for each in found if each is not None and each.requires_grad]


def _evaluate(function: _Evaluation, tensors: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Return `function(*tensors)`, of which only the tensors are kept for derivatives.

    Args:
        function: reads no other tensor that has a derivative.
        tensors: with tangents of forward mode, or without.
    """
    count = len(tensors)
    if _in_transform():
        # The transform at hand takes the tensors apart, and calls `apply` again with what is inside.
        found = _Remat.apply(function, count, *tensors, *[None] * count)
        return found[: len(found) // 2]
    values, tangents = apart(tensors)
    if not (torch.is_grad_enabled() and any(each.requires_grad for each in values)):
        with Recording(False):
            return function(*tensors)
    found = _Remat.apply(function, count, *values, *tangents)
    return joined(found[: len(found) // 2], found[len(found) // 2 :])


class _Remat(Function):
    """A function whose backward evaluates it again; that backward is such a function itself.

    Tangents of forward mode are arguments and results of their own: autograd would otherwise call this for the values
    alone, and then once more for the tangents.
    """

    @classmethod
    def apply(cls, function: _Evaluation, count: int, *both: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the values, then their tangents; where the arguments are not taken apart, neither are the values."""
        points = [each for each in both[:count] if each is not None]
        if not _in_transform() and any_has_tangent(points):
            found = _evaluate(function, points)
            return (*found, *[None] * len(found))
        result: tuple[Tensor | None, ...] = super().apply(function, count, *both)
        return result

    @staticmethod
    def forward(function: _Evaluation, count: int, *both: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the values, then their tangents.

        Args:
            function: to evaluate.
            count: of its arguments.
            both: the values of the arguments, then their tangents.
        """
        # Forward mode is switched off within a custom function.
        with forward_ad._set_fwd_grad_enabled(True):
            given = [None if each is None else each.detach() for each in both]
            points = [each for each in given[:count] if each is not None]
            found, tangents = apart(function(*joined(points, given[count:])))
        return (*_own(found, points), *tangents)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        """Keep the arguments."""
        ctx.function, ctx.count, *both = inputs
        ctx.save_for_backward(*both)
        ctx.save_for_forward(*both)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the cotangents of the arguments, which have tangents where the arguments have."""
        count, both = ctx.count, ctx.saved_tensors
        given, of_tangents = cotangents[: len(cotangents) // 2], cotangents[len(cotangents) // 2 :]
        if any(each is not None for each in of_tangents):
            raise RuntimeError(_REVERSE_OVER_FORWARD)
        wanted = _wanted(ctx, both[:count])
        pullback = _Pullback(ctx.function, count, wanted, [each is not None for each in given])
        points = joined(both[:count], both[count:])
        found = iter(_evaluate(pullback, [*points, *[each for each in given if each is not None]]))
        return (None, None, *[next(found) if flag else None for flag in wanted], *[None] * count)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the tangents of the values, for `torch.func.jvp`."""
        points = joined(ctx.saved_tensors[: ctx.count], tangents[2 : 2 + ctx.count])
        with forward_ad._set_fwd_grad_enabled(True):
            found = apart(ctx.function(*points))[1]
        return (*found, *[None] * len(found))

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], function: _Evaluation, count: int, *both: Tensor | None
    ) -> tuple[tuple[Tensor | None, ...], tuple[int | None, ...]]:
        """Return the values along a leading axis: what is evaluated again is the function along that axis."""
        axes = in_dims[2 : 2 + count]

        def batched(*tensors: Tensor) -> Sequence[Tensor | None]:
            return list(torch.vmap(function, in_dims=axes, randomness=info.randomness)(*tensors))

        found = _evaluate(batched, [each for each in both[:count] if each is not None])
        nothing = [None] * len(found)
        return (*found, *nothing), (*[None if each is None else 0 for each in found], *nothing)


def _own(found: Sequence[Tensor | None], given: Sequence[Tensor]) -> list[Tensor | None]:
    """Return results that may be changed in place: torch allows that for no view that a custom function has made.

    A view is a tensor of its own where nothing else is on its memory. Other ones stay views, of which torch refuses
    changes: they would have to reach an input, or another result.
    """
    views = [each is not None and not is_functorch_wrapped_tensor(each) and each._is_view() for each in found]
    if not any(views):
        return list(found)
    others = [each for each in (*given, *found) if each is not None and not is_functorch_wrapped_tensor(each)]
    counts = Counter(each.untyped_storage()._cdata for each in others if each.layout == torch.strided)
    return [
        each.data if each is not None and is_view and counts[each.untyped_storage()._cdata] == 1 else each
        for each, is_view in zip(found, views, strict=True)
    ]


class _Pullback:
    """The pullback of a function, as a function: arguments and cotangents in, cotangents of the arguments out.

    Args:
        function: the one that is differentiated.
        count: of its arguments.
        wanted: which of them want a cotangent.
        has_cotangent: which of its results have one.
    """

    def __init__(
        self, function: _Evaluation, count: int, wanted: Sequence[bool], has_cotangent: Sequence[bool]
    ) -> None:
        self._function = function
        self._count = count
        self._wanted = tuple(wanted)
        self._has_cotangent = tuple(has_cotangent)

    def __call__(self, *given: Tensor) -> Sequence[Tensor | None]:
        """Return a cotangent for each argument that wants one; None where nothing depends on it."""
        points, cotangents = given[: self._count], given[self._count :]
        # Within the evaluation of its own pullback, the results need a graph.
        create_graph = torch.is_grad_enabled()
        if _in_transform():
            return self._by_transform(points, cotangents)
        if not create_graph and any_has_tangent(given):
            # The transform records whatever requires a gradient, with or without `torch.no_grad`.
            return self._by_transform(_constants(points), _constants(cotangents))
        values, tangents = apart(points)
        with torch.enable_grad():
            leaves = [
                value.view_as(value) if create_graph and value.requires_grad else value.detach().requires_grad_(flag)
                for value, flag in zip(values, self._wanted, strict=True)
            ]
            results = self._with_cotangent(self._function(*joined(leaves, tangents)))
            pairs = [(y, v) for y, v in zip(results, cotangents, strict=True) if y.requires_grad]
            sources = [leaf for leaf, flag in zip(leaves, self._wanted, strict=True) if flag]
            if not pairs or not sources:
                return [None] * len(sources)
            return torch.autograd.grad(
                [y for y, _ in pairs],
                sources,
                [v for _, v in pairs],
                create_graph=create_graph,
                allow_unused=True,
            )

    def _by_transform(self, points: Sequence[Tensor], cotangents: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the same by torch.func.

        Within one of its transforms autograd cannot be called. And where there are tangents, autograd would record them
        as well: twice the memory, part of it in circles that last as long as the level of forward mode.
        """

        def function(*sources: Tensor) -> tuple[Tensor, ...]:
            moved = iter(sources)
            arguments = [next(moved) if flag else point for point, flag in zip(points, self._wanted, strict=True)]
            return tuple(self._with_cotangent(self._function(*arguments)))

        sources = [point for point, flag in zip(points, self._wanted, strict=True) if flag]
        found: Sequence[Tensor] = torch.func.vjp(function, *sources)[1](tuple(cotangents))
        return found

    def _with_cotangent(self, results: Sequence[Tensor | None]) -> list[Tensor]:
        return [y for y, flag in zip(results, self._has_cotangent, strict=True) if flag and y is not None]


def _wanted(node: Any, arguments: Sequence[Tensor | None]) -> list[bool]:
    """Return which arguments of a node want a cotangent from the backward pass at hand.

    What requires a gradient need not be asked for: of the pullback of a block, a cross product wants the cotangent of
    the cotangents alone, and neither the block's parameters nor its input.

    Args:
        node: of `_Remat`, whose backward is running.
        arguments: of its function.
    """
    flags: tuple[bool, ...] = node.needs_input_grad[2 : 2 + len(arguments)]
    if _in_transform():
        return list(flags)
    edges = iter(node.next_functions)
    before = [None if each is None else next(edges)[0] for each in arguments]
    return [flag and _is_asked_for(each) for flag, each in zip(flags, before, strict=True)]


def _is_asked_for(node: Any) -> bool:
    """Return whether the backward pass at hand leads to a node; a leaf is refused by name where it does."""
    try:
        found: bool = torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return True
    return found


def _constants(tensors: Sequence[Tensor]) -> list[Tensor]:
    values, tangents = apart(tensors)
    return joined([each.detach() for each in values], [None if each is None else each.detach() for each in tangents])
