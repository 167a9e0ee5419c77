"""Train augmentation of a whole batch at once, reproducible from a seed."""

import torch
import torch.nn.functional as F
from torch import Tensor

# n: images, c: channels, h, w: height and width, p: padding


class CropAndFlip:
    """Random crops of the zero-padded images, then (unless `flip` is false) a flip of every second one on average.

    Args:
        padding: pixels added on each side before the crop; offsets are uniform over `0 .. 2 * padding`.
        flip: whether images are flipped horizontally; digits must not be.

    Source: He et al. 2016, Deep Residual Learning for Image Recognition, section 4.2 (padding 4, CIFAR-10).

    Example:
        >>> images = torch.ones(2, 3, 32, 32, dtype=torch.uint8)
        >>> CropAndFlip()(images, torch.Generator().manual_seed(0)).shape
        torch.Size([2, 3, 32, 32])
    """

    def __init__(self, padding: int = 4, flip: bool = True) -> None:
        self.padding = padding
        self.flip = flip

    def __call__(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return augmented images.

        Args:
            images: (n, c, h, w), any dtype; zero is what the border is filled with.
            generator: where the offsets and flips are drawn from; None: torch's global generator.

        Returns:
            (n, c, h, w), same dtype.
        """
        num_images, _, height, width = images.shape
        padded = F.pad(images, [self.padding] * 4)
        # Every crop as a view: (n, c, 2p + 1, 2p + 1, h, w); only the chosen ones are copied.
        crops = padded.unfold(2, height, 1).unfold(3, width, 1)
        offsets = torch.randint(0, 2 * self.padding + 1, (2, num_images), generator=generator)
        cropped = crops[torch.arange(num_images), :, offsets[0], offsets[1]]
        if not self.flip:
            return cropped
        is_flipped = torch.rand(num_images, generator=generator) < 0.5
        return torch.where(is_flipped[:, None, None, None], cropped.flip(-1), cropped)
