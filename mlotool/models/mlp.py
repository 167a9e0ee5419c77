"""Fully connected classifiers of flattened images."""

from collections.abc import Sequence
from itertools import pairwise
from math import prod

from torch import Tensor, nn

from mlotool.core.settings import Count, Shape, target

# b: batch, k: classes


@target("module")
class MLP(nn.Module):
    """Linear layers with ReLU between them.

    Args:
        image_shape: shape of one input, of any length; it is flattened.
        num_classes: k.
        hidden: width of each hidden layer; an empty list makes a linear classifier.

    Example:
        >>> MLP([1, 8, 8], 10, hidden=[32])
        MLP(
          (layers): Sequential(
            (0): Flatten(start_dim=1, end_dim=-1)
            (1): Linear(in_features=64, out_features=32, bias=True)
            (2): ReLU()
            (3): Linear(in_features=32, out_features=10, bias=True)
          )
        )
    """

    def __init__(self, image_shape: Shape, num_classes: Count, hidden: Sequence[Count] = (128, 128)) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Flatten()]
        for num_inputs, num_outputs in pairwise([prod(image_shape), *hidden]):
            layers += [nn.Linear(num_inputs, num_outputs), nn.ReLU()]
        layers.append(nn.Linear([prod(image_shape), *hidden][-1], num_classes))
        self.layers = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (b, k) of images (b, *image_shape)."""
        return self.layers(images)

    def features_and_logits(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of the last layer (b, hidden[-1]), and the logits (b, k)."""
        features = self.layers[:-1](images)
        return features, self.layers[-1](features)


@target("module")
class Linear(nn.Module):
    """Softmax regression: one linear layer from pixels to logits, a convex problem.

    Args:
        image_shape: shape of one input, of any length; it is flattened.
        num_classes: k.
        bias: whether the layer has a bias.
    """

    def __init__(self, image_shape: Shape, num_classes: Count, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(prod(image_shape), num_classes, bias=bias)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (b, k) of images (b, *image_shape)."""
        return self.linear(images.flatten(1))
