"""Made-up spectra: one smooth curve a class, and noise."""

from collections.abc import Mapping

import numpy as np
import torch

from mlotool.core.errors import ConfigError
from mlotool.core.settings import Count, NonNegative, Seed, Shape, Whole, target
from mlotool.data.spectra import AbstractSpectra

# n: pixels, d: bands, k: classes

NUM_BUMPS = 6
BRIGHTNESS_STD = 0.1


@target("data")
class SyntheticSpectra(AbstractSpectra):
    """Pixels of the shape of Indian Pines, without a file: `x = a s_c + noise e`, standardised as `IndianPines`.

    The spectrum s_c of class c is a sum of a curve that all classes share and of six Gaussian bumps of its own, a
    quarter as high; the brightness a of a pixel is normal with mean 1 and standard deviation 0.1. The noise e is
    smooth along the bands (a moving average of nine) with standard deviation 1, as errors of a sensor and mixed
    pixels are, and not independent by band, which 220 bands would average out.

    Args:
        sizes: number of pixels by split name, drawn disjoint and stratified; there are as many as they add up to,
            with equal shares of the classes (to within one).
        num_classes: k.
        image_shape: (d,).
        noise: standard deviation of the noise, where the classes' spectra differ by about 0.25.
        seed: of spectra, pixels and splits.

    Raises:
        ConfigError: fewer pixels than classes, or `image_shape` is not one number.

    Source: stands in for the data of Günther et al. 2020 (arXiv 1812.04352), section 5.1, test case 2.

    Example:
        >>> data = SyntheticSpectra({"train": 1000, "val": 200})
        >>> data.split("train")[0]["input"].shape, data.num_classes
        (torch.Size([220]), 16)
    """

    def __init__(
        self,
        sizes: Mapping[str, Whole],
        num_classes: Count = 16,
        image_shape: Shape = (220,),
        noise: NonNegative = 0.2,
        seed: Seed = 0,
    ) -> None:
        num_pixels = sum(int(size) for size in sizes.values())
        if len(image_shape) != 1:
            raise ConfigError(
                f"data.image_shape={list(image_shape)}; expected [d], the number of bands. Set data.image_shape=[220]."
            )
        if num_pixels < num_classes:
            raise ConfigError(
                f"data.sizes adds up to {num_pixels} pixels; expected at least {num_classes}, one a class. "
                f"Set data.sizes.train={num_classes}."
            )
        generator = np.random.default_rng([seed, 3])
        spectra = class_spectra(num_classes, image_shape[0], generator)
        target = np.arange(num_pixels) % num_classes
        brightness = 1 + BRIGHTNESS_STD * generator.standard_normal((num_pixels, 1))
        errors = _smooth_noise(num_pixels, image_shape[0], generator)
        pixels = torch.from_numpy(brightness * spectra[target] + noise * errors)
        super().__init__(pixels, torch.from_numpy(target), sizes, num_classes, image_shape, seed)


def class_spectra(num_classes: int, num_bands: int, generator: np.random.Generator) -> np.ndarray:
    """Return one smooth spectrum a class, (k, d)."""
    shared, own = _bumps(1, num_bands, generator), _bumps(num_classes, num_bands, generator)
    return 1 + shared + own / 4


def _bumps(num_curves: int, num_bands: int, generator: np.random.Generator) -> np.ndarray:
    bands = np.linspace(0, 1, num_bands)
    shape = (num_curves, NUM_BUMPS, 1)
    height, center = generator.standard_normal(shape), generator.uniform(0, 1, shape)
    width = generator.uniform(0.03, 0.15, shape)
    return (height * np.exp(-(((bands - center) / width) ** 2) / 2)).sum(axis=1)


def _smooth_noise(num_pixels: int, num_bands: int, generator: np.random.Generator) -> np.ndarray:
    window = 9
    white = generator.standard_normal((num_pixels, num_bands + window - 1))
    total = np.cumsum(np.pad(white, ((0, 0), (1, 0))), axis=1)
    return (total[:, window:] - total[:, :-window]) / np.sqrt(window)
