"""Image files that look like a tensor: they are decoded when they are indexed."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

# n: images, b: batch, h, w: height and width


class ImageFiles:
    """JPEG or PNG files as RGB images of one size; another size is scaled and its middle cut out.

    Args:
        paths: n files.
        height: h in pixels.
        width: w in pixels.
        num_threads: that read and decode.
    """

    def __init__(self, paths: Sequence[Path], height: int, width: int, num_threads: int = 8) -> None:
        self.paths = list(paths)
        self.height = height
        self.width = width
        self.num_threads = num_threads

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape (n, 3, h, w)."""
        return (len(self.paths), 3, self.height, self.width)

    def subset(self, indices: Tensor) -> "ImageFiles":
        """Return the files at `indices`, undecoded."""
        return ImageFiles([self.paths[i] for i in indices.tolist()], self.height, self.width, self.num_threads)

    def load(self) -> Tensor:
        """Return all images, (n, 3, h, w) uint8."""
        return self[torch.arange(len(self.paths))]

    def __getitem__(self, indices: Tensor) -> Tensor:
        """Return the images (b, 3, h, w) uint8 at `indices` (b,)."""
        pixels = np.empty((len(indices), self.height, self.width, 3), dtype=np.uint8)

        def decode(places: range) -> None:
            for place in places:
                pixels[place] = self._decode(self.paths[int(indices[place])])

        chunks = [range(start, len(indices), self.num_threads) for start in range(self.num_threads)]
        with ThreadPoolExecutor(self.num_threads) as executor:
            list(executor.map(decode, chunks))  # list(): raises what a thread raised
        return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()

    def _decode(self, path: Path) -> np.ndarray:
        from PIL import Image, ImageOps

        with Image.open(path, formats=("JPEG", "PNG")) as file:
            image = file.convert("RGB")
        if image.size != (self.width, self.height):
            image = ImageOps.fit(image, (self.width, self.height), Image.Resampling.BILINEAR)
        return np.asarray(image)
