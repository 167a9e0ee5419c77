"""The solution node: theta*_l as tensors whose backward is l's pullback.

It is for those who differentiate a pullback, and for `Program.solution`. The node saves its OUTPUTS: differentiating
the pullback with respect to theta leads back into the node. On several ranks the pullback gets the mean cotangent:
where its factors are means of their own, their product would not be the mean of the ranks' products.
"""

from typing import Any

import torch
from torch import Tensor

from mlotool.core.random_stream import RandomStream
from mlotool.problem.pullback import Pullback
from mlotool.problem.rank_mean import RankMean


class Solution(torch.autograd.Function):
    """theta*_l of the inputs x."""

    @staticmethod
    def forward(
        ctx: Any, ranks: RankMean, random: RandomStream, pullback: Pullback, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        """Hand on the current parameters; the pullback will draw the random numbers of `random`."""
        outputs = tuple(tensor.view_as(tensor) for tensor in pullback.outputs)
        ctx.ranks, ctx.random, ctx.pullback = ranks, random, pullback
        ctx.num_inputs = len(inputs)
        ctx.save_for_backward(*inputs, *outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *cotangent: Tensor) -> tuple[Tensor | None, ...]:
        """Pull a cotangent of theta*_l back to the inputs."""
        inputs, theta = ctx.saved_tensors[: ctx.num_inputs], ctx.saved_tensors[ctx.num_inputs :]
        wanted, cotangent = ctx.needs_input_grad[3:], ctx.ranks.mean(cotangent)
        with ctx.random:
            if torch.is_grad_enabled():
                found = ctx.pullback.differentiable(theta, inputs, wanted, cotangent)
            else:
                found = ctx.pullback.first_order(theta, inputs, wanted, cotangent)
        values = iter(found)
        return (None, None, None, *(next(values) if flag else None for flag in wanted))
