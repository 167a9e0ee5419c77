"""The networks of the layer-parallel experiments: an opening, many equal residual layers, a classifier."""

from collections.abc import Callable
from math import prod, sqrt
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlotool.core.arguments import require
from mlotool.core.settings import Count, Layers, NonNegative, Positive, Shape, target

# N: layers, m: some of them, b: batch, d: width, c: channels, k: kernel size, h, w: height and width of an image


def smooth_relu(x: Tensor) -> Tensor:
    """Return max(x, 0), smoothed around zero so that the derivative is continuous.

        sigma(x) = max(x, 0)                    where |x| > 1/10
        sigma(x) = 5/2 x^2 + x/2 + 1/40         where |x| <= 1/10

    Source: Günther et al. 2020 (arXiv 1812.04352), equation 5.34, whose "2 1/2" is 5/2.

    Example:
        >>> smooth_relu(torch.tensor([-1.0, 0.0, 1.0]))
        tensor([0.0000, 0.0250, 1.0000])
    """
    return 2.5 * (x.clamp(-0.1, 0.1) + 0.1) ** 2 + F.relu(x - 0.1)


Activation = Literal["smooth_relu", "tanh", "relu"]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"smooth_relu": smooth_relu, "tanh": torch.tanh, "relu": F.relu}


@target("module")
class ResidualLayers(nn.Module):
    """N residual layers that keep the shape, `u^{n+1} = u^n + h sigma(K^n u^n + b^n)` with `h = T / N`.

    K is a dense matrix (`kernel_size=None`) or a convolution with stride 1. The parameters of all layers are in two
    tensors with the layers along the first axis: `weight` (N, d, d) or (N, c, c, k, k) and `bias` (N, d) or (N, c). The
    n-th layer has `weight[n]` and `bias[n]`; a coarse grid of multigrid takes every m-th layer.

    Args:
        num_layers: N.
        width: d, or c for a convolution.
        final_time: T.
        kernel_size: size of the convolution, odd; None: a dense matrix.
        activation: sigma, `smooth_relu`, `tanh` or `relu`.
        initial_scale: standard deviation of the initial weights (normally distributed), as a multiple of 1 / sqrt(fan
            in).
        equal_start: whether all layers start with equal weights, so that neighboring layers are similar, which
            multigrid across layers needs.

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
        keeps_size = kernel_size is None or kernel_size % 2 == 1
        require(keeps_size, "kernel_size", kernel_size, "an odd number, which keeps the image's size")
        self.num_layers = num_layers
        self.h = final_time / num_layers
        self.activation = activation
        self.padding = None if kernel_size is None else kernel_size // 2
        shape = (width, width) if kernel_size is None else (width, width, kernel_size, kernel_size)
        drawn = torch.randn(1 if equal_start else num_layers, *shape) * initial_scale / sqrt(prod(shape[1:]))
        self.weight = nn.Parameter(drawn.expand(num_layers, *shape).clone())
        self.bias = nn.Parameter(torch.zeros(num_layers, width))

    def forward(self, state: Tensor, layers: range | None = None) -> Tensor:
        """Return the state, (b, d) or (b, c, h, w), after these layers, one after the other; None: all layers."""
        # unbind: one stack of the gradients at the end, where weight[n] would add up N gradients of all layers.
        weights, biases = self.weight.unbind(), self.bias.unbind()
        for n in range(self.num_layers) if layers is None else layers:
            state = self._step(state, weights[n], biases[n], self.h)
        return state

    def layer(self, state: Tensor, n: int, h: float | None = None) -> Tensor:
        """Return u^{n+1} for u^n, with the layer's own step size or with another one."""
        return self._step(state, self.weight[n], self.bias[n], self.h if h is None else h)

    def many(self, states: Tensor, layers: range, h: float) -> Tensor:
        """Return the results of several layers, each for its own state, at once.

        Args:
            states: (m, b, d) or (m, b, c, h, w), one per layer.
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


# N: layers, b: batch, d: width, c: channels, h, w: height and width of an image, k: classes


class _ResidualNetwork(nn.Module):
    """An opening, residual layers, and a classifier."""

    opening: nn.Module
    layers: ResidualLayers
    classifier: nn.Module

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits (b, k) of inputs (b, *image_shape)."""
        return self.features_and_logits(inputs)[1]

    def features_and_logits(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the last layer reads, (b, d) or (b, c, h, w), and the logits (b, k)."""
        features = self.layers(self.opening(inputs))
        return features, self.classifier(features)


@target("module")
class DenseResidualNetwork(_ResidualNetwork):
    """A network of N dense residual layers between a first layer and a linear classifier.

        u^0 = sigma(L_in y),   u^{n+1} = u^n + h sigma(K^n u^n + b^n),   logits = W u^N + mu

    Args:
        image_shape: shape of one input, of any length; it is flattened.
        num_classes: k.
        num_layers: N.
        width: d.
        final_time: T; h = T / N.
        activation: sigma, see `ResidualLayers`.
        opening: the first layer. `dense`: a learned matrix L_in without bias, followed by sigma; `identity`: u^0 = y,
            for inputs of `width` numbers.
        initial_scale: see `ResidualLayers`.
        equal_start: see `ResidualLayers`.

    Raises:
        ConfigError: an option does not exist, or `opening` is `identity` and the input does not have `width` numbers.

    Source: Günther et al. 2020 (arXiv 1812.04352), section 5.1, test cases 1 (width 8, T = 5, dense) and 2 (width 220,
    T = 20, identity).

    Example:
        >>> import torch
        >>> DenseResidualNetwork([2], 5, num_layers=16)(torch.zeros(3, 2)).shape
        torch.Size([3, 5])
    """

    def __init__(
        self,
        image_shape: Shape,
        num_classes: Count,
        num_layers: Layers = 64,
        width: Count = 8,
        final_time: Positive = 5.0,
        activation: Activation = "smooth_relu",
        opening: Literal["dense", "identity"] = "dense",
        initial_scale: NonNegative = 1.0,
        equal_start: bool = False,
    ) -> None:
        super().__init__()
        self.layers = ResidualLayers(
            num_layers, width, final_time, None, activation, initial_scale=initial_scale, equal_start=equal_start
        )
        self.opening = _opening(opening, prod(image_shape), width, activation)
        self.classifier = nn.Linear(width, num_classes)


@target("module")
class ConvolutionalResidualNetwork(_ResidualNetwork):
    """A network of N convolutional residual layers; the image is copied to all channels at the start.

        u^0 = (y, .., y),   u^{n+1} = u^n + h sigma(K^n * u^n + b^n),   logits = W u^N + mu

    Args:
        image_shape: (1, h, w), or (3, h, w) with a multiple of three channels.
        num_classes: k.
        num_layers: N.
        channels: c.
        final_time: T; h = T / N.
        kernel_size: size of the convolutions.
        activation: sigma, see `ResidualLayers`.
        initial_scale: see `ResidualLayers`.
        equal_start: see `ResidualLayers`.

    Raises:
        ConfigError: an option does not exist, or `channels` is not a multiple of the image's channels.

    Source: Günther et al. 2020 (arXiv 1812.04352), section 5.1, test case 3: 8 or 4 channels, T = 5, tanh.

    Example:
        >>> import torch
        >>> ConvolutionalResidualNetwork([1, 8, 8], 10, num_layers=16)(torch.zeros(3, 1, 8, 8)).shape
        torch.Size([3, 10])
    """

    def __init__(
        self,
        image_shape: Shape,
        num_classes: Count,
        num_layers: Layers = 32,
        channels: Count = 8,
        final_time: Positive = 5.0,
        kernel_size: Count = 3,
        activation: Activation = "tanh",
        initial_scale: NonNegative = 1.0,
        equal_start: bool = False,
    ) -> None:
        super().__init__()
        copies, rest = divmod(channels, image_shape[0])
        expected = f"a multiple of the image's {image_shape[0]}, as it is copied to all of them"
        require(not rest, "channels", channels, expected)
        self.layers = ResidualLayers(
            num_layers, channels, final_time, kernel_size, activation, initial_scale, equal_start=equal_start
        )
        self.opening = _Copies(copies)
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(channels * prod(image_shape[1:]), num_classes))


class _Activation(nn.Module):
    """One of `ACTIVATIONS` as a module."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, values: Tensor) -> Tensor:
        return ACTIVATIONS[self.name](values)


class _Copies(nn.Module):
    """Copies of the channels, one block after the other."""

    def __init__(self, copies: int) -> None:
        super().__init__()
        self.copies = copies

    def forward(self, images: Tensor) -> Tensor:
        return images.repeat(1, self.copies, 1, 1)


def _opening(kind: str, num_inputs: int, width: int, activation: str) -> nn.Module:
    if kind == "dense":
        return nn.Sequential(nn.Flatten(), nn.Linear(num_inputs, width, bias=False), _Activation(activation))
    expected = f"{num_inputs}, the numbers of an input, with opening=identity"
    require(num_inputs == width, "width", width, expected, f"Set width={num_inputs}, or opening=dense.")
    return nn.Flatten()
