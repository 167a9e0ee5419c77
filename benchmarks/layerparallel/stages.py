"""Parts of a model that pipelines take, and what two of them hand over."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from mlotool.layerparallel.partition import Stage, partition


class Relaid(torch.autograd.Function):
    """The same numbers in one order of memory, and their gradient in another."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, order: torch.memory_format, order_back: torch.memory_format) -> Tensor:
        """Return the tensor in `order`; its gradient will be in `order_back`."""
        ctx.order_back = order_back
        return tensor.contiguous(memory_format=order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient in the other order."""
        return gradient.contiguous(memory_format=ctx.order_back), None, None


class TracedStage(nn.Module):
    """A stage of mlotool's as a module of one input, for torch's pipelines.

    Args:
        stage: needs of the whole model's inputs nothing, unless it is the first.
    """

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.part = fx.GraphModule(stage.module, stage.graph)
        self.is_first = stage.is_first

    def forward(self, state: Tensor) -> Tensor:
        """Return the next state, or what the whole model returns."""
        return self.part(state) if self.is_first else self.part(state, None)


def traced_stages(model: nn.Module, cut: Sequence[str], example: Tensor) -> list[nn.Module]:
    """Return the parts of a model between cuts.

    Args:
        model: of one input.
        cut: names of the layers that begin the parts but the first.
        example: its input.
    """
    return [TracedStage(each) for each in partition(model, len(cut) + 1, list(cut), example)]
