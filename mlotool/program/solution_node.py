"""The solution node: theta*_l as tensors whose backward is l's pullback.

It is for those who differentiate a pullback, in reverse or forward mode, and for `Program.solution`. The node saves its
OUTPUTS: differentiating the pullback with respect to theta leads back into the node. On several ranks the pullback gets
the mean cotangent: where its factors are means of their own, their product would not be the mean of the ranks'
products.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mlotool.core.random_stream import RandomStream
from mlotool.core.replay import RandomState
from mlotool.core.tangents import any_has_tangent, apart, joined
from mlotool.problem.interface import Pullback
from mlotool.problem.rank_mean import RankMean

Tangents = Sequence[Tensor | None]


class Node(NamedTuple):
    """What a solution node needs beside its inputs.

    Args:
        ranks: the mean over ranks.
        random: what random numbers are drawn from in the backward pass.
        pullback: of the solution.
        devices: the CUDA devices that the problem runs on.
        tangents: of the inputs, then of the solution, where forward mode is taken over the pullback; else empty.
    """

    ranks: RankMean
    random: RandomStream
    pullback: Pullback
    devices: tuple[torch.device, ...] = ()
    tangents: Tangents = ()


def solution(
    node: Node, inputs: Sequence[Tensor], push: Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]
) -> Sequence[Tensor]:
    """Return theta*_l of the inputs, with tangents where these have some.

    Args:
        node: of the solution.
        inputs: what it depends on.
        push: `(inputs, their tangents) -> tangents of theta*_l`.
    """
    if not any_has_tangent(inputs):
        outputs: tuple[Tensor, ...] = Solution.apply(node, *inputs)
        return outputs
    values, tangents = apart(inputs)
    whole = [torch.zeros_like(x) if each is None else each for x, each in zip(values, tangents, strict=True)]
    still = [each.detach() for each in values]
    # What is drawn after the solution is what it would be without tangents.
    with node.random, RandomState(node.devices).replayed(), torch.no_grad():
        moves = push(still, [each.detach() for each in whole])
    return joined(Solution.apply(node._replace(tangents=[*tangents, *moves]), *values), moves)


class Solution(torch.autograd.Function):
    """theta*_l of the inputs x."""

    @staticmethod
    def forward(ctx: Any, node: Node, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Hand on the current parameters; the pullback will draw the random numbers of the program."""
        outputs = tuple(tensor.view_as(tensor) for tensor in node.pullback.outputs)
        ctx.node = node
        ctx.num_inputs = len(inputs)
        ctx.save_for_backward(*inputs, *outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *cotangent: Tensor) -> tuple[Tensor | None, ...]:
        """Pull a cotangent of theta*_l back to the inputs."""
        node, count = ctx.node, ctx.num_inputs
        inputs, theta = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        wanted = ctx.needs_input_grad[1:]
        with node.random:
            if node.tangents:
                found = _moving_pullback(node, theta, inputs, wanted, cotangent)
            elif torch.is_grad_enabled():
                found = node.pullback.differentiable(theta, inputs, wanted, node.ranks.mean(cotangent))
            else:
                found = node.pullback.first_order(theta, inputs, wanted, [*node.ranks.mean(cotangent)])
        values = iter(found)
        return (None, *(next(values) if flag else None for flag in wanted))


def _moving_pullback(
    node: Node, theta: Sequence[Tensor], inputs: Sequence[Tensor], wanted: Sequence[bool], cotangent: Sequence[Tensor]
) -> list[Tensor]:
    """Return the cotangents of the wanted inputs, and as their tangents how they move.

    A pullback calls autograd, so its own derivative is taken by autograd as well: `J^T p` is linear in p, and its
    derivative transposed is J.
    """
    values, of_cotangent = apart(cotangent)
    whole = [torch.zeros_like(x) if each is None else each for x, each in zip(values, of_cotangent, strict=True)]
    given = [*inputs, *theta, *node.ranks.mean(values)]
    tangents = [*node.tangents, *node.ranks.mean(whole)]
    with torch.enable_grad():
        points = [each.detach().requires_grad_() for each in given]
        last = len(inputs) + len(theta)
        found = node.pullback.differentiable(points[len(inputs) : last], points[: len(inputs)], wanted, points[last:])
        probe = [torch.zeros_like(each, requires_grad=True) for each in found]
        moving = [(x, each.detach()) for x, each in zip(points, tangents, strict=True) if each is not None]
        pulled = torch.autograd.grad(found, [x for x, _ in moving], probe, create_graph=True, materialize_grads=True)
        pairs = [(y, each) for y, (_, each) in zip(pulled, moving, strict=True) if y.requires_grad]
        moves = torch.autograd.grad(
            [y for y, _ in pairs], probe, [each for _, each in pairs], allow_unused=True, materialize_grads=True
        )
    return joined([each.detach() for each in found], moves)
