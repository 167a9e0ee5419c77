"""A network all of whose connections have the same weight, so that only the connections are searched."""

from collections.abc import Callable
from math import prod
from typing import Literal

import torch
from torch import Tensor, nn

from mlotool.core.arguments import require
from mlotool.core.settings import Count, Finite, Shape, target

# b: batch, n: inputs, k: classes

Activation = Literal["linear", "tanh", "relu", "sigmoid", "gaussian", "sine", "cosine", "absolute", "inverse", "step"]
# Those of the paper.
ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: x,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "gaussian": lambda x: torch.exp(-(x**2) / 2),
    "sine": torch.sin,
    "cosine": torch.cos,
    "absolute": torch.abs,
    "inverse": torch.neg,
    "step": lambda x: (x > 0).to(x.dtype),
}


@target("module")
class SharedWeightUnit(nn.Module):
    """A unit with any number of inputs: `a(w (x_1 + .. + x_n))`.

    Inputs and outputs are (b, 2): a value, and the weight w of all connections, which a unit passes on. So all units of
    a network share one weight.

    Args:
        activation: a, one of ACTIVATIONS.

    Raises:
        ConfigError: another activation.

    Example:
        >>> SharedWeightUnit("inverse")(torch.tensor([[1.0, 3.0]]), torch.tensor([[4.0, 3.0]]))
        tensor([[-15.,   3.]])
    """

    def __init__(self, activation: Activation = "linear") -> None:
        super().__init__()
        self.activation = activation

    def forward(self, first: Tensor, *others: Tensor) -> Tensor:
        """Return a signal (b, 2)."""
        total = first[:, :1]
        for signal in others:
            total = total + signal[:, :1]
        return torch.cat([ACTIVATIONS[self.activation](first[:, 1:] * total), first[:, 1:]], dim=1)

    def extra_repr(self) -> str:
        """Say which activation it has."""
        return self.activation


@target("module")
class SharedWeightNetwork(nn.Module):
    """A network with one weight: hidden units, each of which reads some inputs, and output units, one per class.

    The inputs are divided among the units `hidden.0`, `hidden.1`, .., and these among `outputs.0`, `outputs.1`, .., as
    evenly as possible. The weight is the only parameter. A search scores connections by the accuracy for several values
    of the weight, without training; the weight may be trained afterwards.

    Args:
        image_shape: shape of one input, of any length; it is flattened.
        num_classes: k.
        num_hidden: number of hidden units, at least k and at most the number of inputs.
        weight: initial value of the weight.

    Raises:
        ConfigError: a unit would have no input.

    Source: Gaier and Ha 2019, Weight Agnostic Neural Networks (arXiv 1906.04358), section 3.

    Example:
        >>> network = SharedWeightNetwork([4], 2, num_hidden=2, weight=-1.0)
        >>> network(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
        tensor([[4., 6.]], grad_fn=<CatBackward0>)
    """

    def __init__(self, image_shape: Shape, num_classes: Count, num_hidden: Count = 2, weight: Finite = 1.0) -> None:
        super().__init__()
        self.num_inputs = prod(image_shape)
        expected = f"from {num_classes}, the classes, to {self.num_inputs}, the inputs, so that each unit reads some"
        require(num_classes <= num_hidden <= self.num_inputs, "num_hidden", num_hidden, expected)
        self.weight = nn.Parameter(torch.tensor(float(weight)))
        self.hidden = nn.ModuleList(SharedWeightUnit() for _ in range(num_hidden))
        self.outputs = nn.ModuleList(SharedWeightUnit() for _ in range(num_classes))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits (b, k) of inputs (b, ...)."""
        values = inputs.flatten(1)
        weight = self.weight + torch.zeros_like(values[:, :1])
        signals = [torch.cat([values[:, i : i + 1], weight], dim=1) for i in range(self.num_inputs)]
        hidden = [unit(*signals[i :: len(self.hidden)]) for i, unit in enumerate(self.hidden)]
        outputs = [unit(*hidden[i :: len(self.outputs)]) for i, unit in enumerate(self.outputs)]
        return torch.cat([signal[:, :1] for signal in outputs], dim=1)
