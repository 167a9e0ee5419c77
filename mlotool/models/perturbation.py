"""Learned perturbations of samples, within a bound."""

from typing import Literal

import torch
from torch import Tensor, nn

from mlotool.core.settings import Count, NonNegative, Shape, target

# b: batch, n: samples that have a perturbation


@target("module")
class BoundedPerturbation(nn.Module):
    """One additive perturbation for each of the first samples of a split, none of whose entries leaves +-radius.

        d_i = radius tanh(raw_i) for i < n,   0 for the others

    Args:
        image_shape: shape of one sample.
        num_samples: n; the samples are those with an index below it.
        radius: of the maximum norm, in units of the normalised input.
        start: `zero`; or `random`: each entry about radius or -radius, of full size but not learned.

    Raises:
        ConfigError: `radius` is negative, or `start` unknown.

    Source: Huang et al. 2020, MetaPoison (arXiv 2004.00225), section 2.2, which clips where tanh stays smooth.

    Example:
        >>> BoundedPerturbation([1, 2, 2], num_samples=3, radius=0.5)(torch.tensor([2, 7])).shape
        torch.Size([2, 1, 2, 2])
    """

    def __init__(
        self, image_shape: Shape, num_samples: Count, radius: NonNegative, start: Literal["zero", "random"] = "zero"
    ) -> None:
        super().__init__()
        self.radius = radius
        shape = (num_samples, *image_shape)
        # tanh(3) = 0.995
        initial = torch.zeros(shape) if start == "zero" else 3.0 * torch.randn(shape).sign()
        self.raw = nn.Parameter(initial)

    def forward(self, index: Tensor) -> Tensor:
        """Return perturbations (b, *image_shape) of the samples at `index` (b,)."""
        has_one = index < len(self.raw)
        raw = self.raw[torch.where(has_one, index, 0)]
        return self.radius * torch.tanh(raw) * has_one.reshape(-1, *[1] * (raw.dim() - 1))
