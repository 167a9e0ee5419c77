"""Many equal residual layers: explicit Euler steps of a differential equation, run one after the other."""

from collections.abc import Callable
from math import prod, sqrt
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlotool.core.errors import ConfigError
from mlotool.core.settings import Count, Layers, NonNegative, Positive, target

# N: layers, m: some of them, b: batch, d: width, c: channels, k: kernel size, h, w: height and width of an image


def smooth_relu(x: Tensor) -> Tensor:
    """Return max(x, 0), rounded off around zero, so that its derivative is continuous.

        sigma(x) = max(x, 0)                    where |x| > 1/10
        sigma(x) = 5/2 x^2 + x/2 + 1/40         where |x| <= 1/10

    Source: Günther et al. 2020 (arXiv 1812.04352), equation 5.34, whose "2 1/2" is 5/2.

    Example:
        >>> smooth_relu(torch.tensor([-1.0, 0.0, 1.0]))
        tensor([0.0000, 0.0250, 1.0000])
    """
    return 2.5 * (x.clamp(-0.1, 0.1) + 0.1) ** 2 + F.relu(x - 0.1)


Activation = Literal["smooth_relu", "tanh", "relu"]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "smooth_relu": smooth_relu,
    "tanh": torch.tanh,
    "relu": F.relu,
}


@target("module")
class ResidualLayers(nn.Module):
    """N residual layers that keep the shape, `u^{n+1} = u^n + h sigma(K^n u^n + b^n)` with `h = T / N`.

    K is a dense matrix (`kernel_size=None`) or a convolution with stride 1. The parameters of all layers lie in two
    tensors with the layers along the first axis: `weight` (N, d, d) or (N, c, c, k, k) and `bias` (N, d) or (N, c), so
    that the n-th layer's are `weight[n]` and `bias[n]`, and a coarse grid's every so many of them.

    Args:
        num_layers: N.
        width: d, or c for a convolution.
        final_time: T.
        kernel_size: of the convolution, odd; None: a dense matrix.
        activation: sigma, `smooth_relu`, `tanh` or `relu`.
        initial_scale: of the weights' normal distribution at the start, in 1 / sqrt(fan in).
        equal_start: whether all layers start from the same weights: neighbouring layers are then alike, as multigrid
            across layers wants them.

    Raises:
        ConfigError: an even kernel, or an unknown activation.

    Source: Günther et al. 2020 (arXiv 1812.04352), equation 2.5 and section 5.1.

    Example:
        >>> ResidualLayers(num_layers=16, width=8)(torch.zeros(5, 8)).shape
        torch.Size([5, 8])
    """

    def __init__(
        self,
        num_layers: Layers,
        width: Count,
        final_time: Positive = 5.0,
        kernel_size: Count | None = None,
        activation: Activation = "smooth_relu",
        initial_scale: NonNegative = 1.0,
        equal_start: bool = False,
    ) -> None:
        super().__init__()
        _check(kernel_size, activation)
        self.num_layers = num_layers
        self.h = final_time / num_layers
        self.activation = activation
        self.padding = None if kernel_size is None else kernel_size // 2
        shape = (width, width) if kernel_size is None else (width, width, kernel_size, kernel_size)
        drawn = torch.randn(1 if equal_start else num_layers, *shape) * initial_scale / sqrt(prod(shape[1:]))
        self.weight = nn.Parameter(drawn.expand(num_layers, *shape).clone())
        self.bias = nn.Parameter(torch.zeros(num_layers, width))

    def forward(self, state: Tensor, layers: range | None = None) -> Tensor:
        """Return the state after these layers, (b, d) or (b, c, h, w), one after the other; None are all."""
        # unbind: one stack of the gradients at the end, where weight[n] would add up N gradients of all layers.
        weights, biases = self.weight.unbind(), self.bias.unbind()
        for n in range(self.num_layers) if layers is None else layers:
            state = self._step(state, weights[n], biases[n], self.h)
        return state

    def layer(self, state: Tensor, n: int, h: float | None = None) -> Tensor:
        """Return u^{n+1} of u^n, with the layer's own step or another one."""
        return self._step(state, self.weight[n], self.bias[n], self.h if h is None else h)

    def many(self, states: Tensor, layers: range, h: float) -> Tensor:
        """Return what so many layers make of a state each, at once.

        Args:
            states: (m, b, d) or (m, b, c, h, w), one a layer.
            layers: m layer indices with a positive step.
            h: the step size.
        """
        part = slice(layers.start, layers.stop, layers.step)
        weight, bias = self.weight[part], self.bias[part]
        if self.padding is None:
            change = torch.baddbmm(bias[:, None], states, weight.transpose(1, 2))
        else:
            change = _grouped_convolution(states, weight, bias, self.padding)
        return states + h * ACTIVATIONS[self.activation](change)

    def _step(self, state: Tensor, weight: Tensor, bias: Tensor, h: float) -> Tensor:
        if self.padding is None:
            change = F.linear(state, weight, bias)
        else:
            change = F.conv2d(state, weight, bias, padding=self.padding)
        return state + h * ACTIVATIONS[self.activation](change)

    def extra_repr(self) -> str:
        """Return what `print` shows."""
        return f"num_layers={self.num_layers}, width={self.bias.shape[1]}, h={self.h:g}, activation={self.activation}"


def _grouped_convolution(states: Tensor, weight: Tensor, bias: Tensor, padding: int) -> Tensor:
    """Convolve each of the states (m, b, c, h, w) with a kernel of its own (m, c, c, k, k): m groups of channels."""
    num_layers, num_samples, *image = states.shape
    channels = states.transpose(0, 1).reshape(num_samples, -1, *image[1:])
    change = F.conv2d(channels, weight.flatten(0, 1), bias.flatten(), padding=padding, groups=num_layers)
    return change.reshape(num_samples, num_layers, *image).transpose(0, 1)


def _check(kernel_size: int | None, activation: str) -> None:
    if kernel_size is not None and kernel_size % 2 == 0:
        raise ConfigError(
            f"ResidualLayers: kernel_size={kernel_size}; expected an odd number, which keeps the image's size. "
            f"Set kernel_size={kernel_size + 1}."
        )
