"""The networks of the layer-parallel experiments: an opening, many equal residual layers, a classifier."""

from math import prod
from typing import Literal

from torch import Tensor, nn

from mlotool.core.errors import ConfigError
from mlotool.core.settings import Count, Layers, NonNegative, Positive, Shape, target
from mlotool.models.residual_layers import ACTIVATIONS, Activation, ResidualLayers

# N: layers, b: batch, d: width, c: channels, h, w: height and width of an image, k: classes


@target("module")
class DenseResidualNetwork(nn.Module):
    """A network of N dense residual layers between an opening and a linear classifier.

        u^0 = sigma(L_in y),   u^{n+1} = u^n + h sigma(K^n u^n + b^n),   logits = W u^N + mu

    Args:
        image_shape: shape of one input, of any length; it is flattened.
        num_classes: k.
        num_layers: N.
        width: d.
        final_time: T; h = T / N.
        activation: sigma, see `ResidualLayers`.
        opening: `dense`, a learned matrix L_in without a constant and one application of sigma; `identity`, u^0 = y,
            for inputs of `width` numbers.
        initial_scale: see `ResidualLayers`.
        equal_start: see `ResidualLayers`.

    Raises:
        ConfigError: an option that does not exist, or an identity between different widths.

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

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits (b, k) of inputs (b, *image_shape)."""
        return self.features_and_logits(inputs)[1]

    def features_and_logits(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the last layer reads (b, d), and the logits (b, k)."""
        features = self.layers(self.opening(inputs))
        return features, self.classifier(features)


@target("module")
class ConvolutionalResidualNetwork(nn.Module):
    """A network of N convolutional residual layers; the image is copied to all channels at the start.

        u^0 = (y, .., y),   u^{n+1} = u^n + h sigma(K^n * u^n + b^n),   logits = W u^N + mu

    Args:
        image_shape: (1, h, w), or (3, h, w) with a multiple of three channels.
        num_classes: k.
        num_layers: N.
        channels: c.
        final_time: T; h = T / N.
        kernel_size: of the convolutions.
        activation: sigma, see `ResidualLayers`.
        initial_scale: see `ResidualLayers`.
        equal_start: see `ResidualLayers`.

    Raises:
        ConfigError: an option that does not exist, or channels that the image's do not divide.

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
        if rest:
            raise ConfigError(
                f"ConvolutionalResidualNetwork: channels={channels}; expected a multiple of the image's "
                f"{image_shape[0]}, as it is copied to all of them. Set channels={(copies + 1) * image_shape[0]}."
            )
        self.layers = ResidualLayers(
            num_layers, channels, final_time, kernel_size, activation, initial_scale, equal_start=equal_start
        )
        self.opening = _Copies(copies)
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(channels * prod(image_shape[1:]), num_classes))

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (b, k) of images (b, *image_shape)."""
        return self.features_and_logits(images)[1]

    def features_and_logits(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the last layer reads (b, c, h, w), and the logits (b, k)."""
        features = self.layers(self.opening(images))
        return features, self.classifier(features)


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
    if num_inputs != width:
        raise ConfigError(
            f"DenseResidualNetwork: opening=identity with width={width}; expected width={num_inputs}, the numbers of "
            f"an input. Set width={num_inputs}, or opening=dense."
        )
    return nn.Flatten()
