"""Data sets of spectra: pixels with many bands."""

from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mlotool.core.arguments import require
from mlotool.core.errors import ConfigError
from mlotool.core.settings import Count, NonNegative, Seed, Shape, target
from mlotool.data.splits import AbstractShapedData, FromFiles, InMemoryTensors, check_splits

# n: pixels, d: bands

SPLITS = ("train", "meta", "val", "test")


@dataclass(eq=False)
class AbstractSpectra(AbstractShapedData[InMemoryTensors]):
    """Base class of data sets of spectra; a subclass reads or makes the pixels and calls `_split`.

    Batches are `{"input": (b, d) float32, "target": (b,) int64, "index": (b,)}`. Each band is shifted and scaled to a
    mean of 0 and a standard deviation of 1 over `train` (over all pixels where there is no train split).

    Args:
        sizes: number of pixels by split name, drawn disjoint and stratified; see `split_indices`.
        num_classes: must be the number of classes of the data; models refer to it in the configuration.
        image_shape: (d,), the shape of one input; models refer to it too.
        seed: seed of the splits.

    Raises:
        ConfigError: the options do not fit the data.
    """

    num_classes: Count = 16
    image_shape: Shape = (220,)

    def _split(self, pixels: Tensor, target: Tensor) -> None:
        """Draw the splits from pixels (n, d) and their classes (n,) int64."""
        check_splits(self.sizes, SPLITS)
        self._check(int(target.max()) + 1, pixels.shape[1:])
        indices = self._drawn(target, self.sizes)
        inputs = _normalised(pixels, indices.get("train"))
        self._hold(
            {
                name: InMemoryTensors({"input": inputs[indices[name]], "target": target[indices[name]]})
                for name in self.sizes
                if name in indices
            }
        )


def _normalised(pixels: Tensor, train: Tensor | None) -> Tensor:
    pixels = pixels.to(torch.float64)
    reference = pixels if train is None else pixels[train]
    std = reference.std(dim=0, correction=0)
    # A band that is the same everywhere stays 0.
    return ((pixels - reference.mean(dim=0)) / std.where(std > 0, torch.ones_like(std))).to(torch.float32)


# h, w: height and width in pixels, d: bands

GROUND_TRUTH = "Indian_pines_gt.mat"
# By number of bands.
IMAGES = {220: "Indian_pines.mat", 200: "Indian_pines_corrected.mat"}
NUMBERS = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "single", "double")
# 145 x 145 x 220 has 4.6 million; a file that claims much more is not this data.
MAX_NUMBERS = 50_000_000


@target("data")
@dataclass(eq=False)
class IndianPines(AbstractSpectra, FromFiles):
    """10,249 labeled pixels of a 145 x 145 image, with 220 spectral bands and 16 kinds of land cover.

    The labels are read from `Indian_pines_gt.mat` (1 to 16; pixels with 0 have no label and are left out). The pixels
    are read from `Indian_pines.mat` for 220 bands, or from `Indian_pines_corrected.mat` for 200 bands, without those
    that water absorbs. Only a file's one array of numbers is read; cells, structs and objects are refused.

    Args:
        root: the folder that holds the files.
        sizes: number of pixels by split name (`train`, `meta`, `val`, `test`), drawn disjoint and stratified.
        num_classes: 16.
        image_shape: (220,), or (200,) for the corrected file.
        seed: seed of the splits.

    Raises:
        ConfigError: a file is missing or has other content; or the options do not fit the data.

    Source: Baumgardner, Biehl and Landgrebe 2015, 220 Band AVIRIS Hyperspectral Image Data Set; 1,000 pixels of it in
    Günther et al. 2020 (arXiv 1812.04352), section 5.1, test case 2.
    """

    seed: Seed = 0

    def __post_init__(self) -> None:
        path = self.folder / IMAGES.get(self.image_shape[0], IMAGES[220])
        advice = "Download them (Indian Pines, AVIRIS), and set data.root to their folder."
        require(path.is_file(), "data.root", self.root, f"a folder with {path.name} and {GROUND_TRUTH}", advice)
        image = read_array(path, num_axes=3)
        labels = read_array(self.folder / GROUND_TRUTH, num_axes=2)
        expected = f"{image.shape[:2]} as in the image"
        advice = "Download both files again."
        require(image.shape[:2] == labels.shape, f"data.root: pixels of {GROUND_TRUTH}", labels.shape, expected, advice)
        target = torch.from_numpy(labels.astype(np.int64))
        pixels = torch.from_numpy(image.astype(np.float64))
        self._split(pixels[target > 0], target[target > 0] - 1)


def read_array(path: Path, num_axes: int) -> np.ndarray:
    """Return the one array of numbers of a .mat file.

    Args:
        path: of the file, in the format of MATLAB 5 to 7.2.
        num_axes: that the array must have.

    Raises:
        ConfigError: the file cannot be read, or holds something else.
    """
    from scipy.io import loadmat, whosmat

    try:
        held = whosmat(path, appendmat=False)
        is_one = len(held) == 1 and held[0][2] in NUMBERS and prod(held[0][1]) <= MAX_NUMBERS
        array = loadmat(path, variable_names=[held[0][0]], appendmat=False)[held[0][0]] if is_one else None
    except Exception as error:  # a broken file: its reader raises whatever it stumbles over
        raise ConfigError(
            f"{path} could not be read ({type(error).__name__}: {error}); expected a file of MATLAB 5 to 7.2. "
            "Download the published file, and set data.root to its folder."
        ) from error
    # What was read may differ from what the header promised.
    is_right = isinstance(array, np.ndarray) and array.dtype.kind in "iuf" and array.ndim == num_axes
    contents = [f"{name}: {kind} {list(shape)}" for name, shape, kind in held]
    require(is_right, str(path), contents, f"one array of numbers with {num_axes} axes", "Download it again.")
    assert isinstance(array, np.ndarray)
    return array


# n: pixels, d: bands, k: classes

NUM_BUMPS = 6
BRIGHTNESS_STD = 0.1


@target("data")
@dataclass(eq=False)
class SyntheticSpectra(AbstractSpectra):
    """Generated pixels with the shape of Indian Pines: `x = a s_c + noise e`, standardized as in `IndianPines`.

    The spectrum s_c of class c is the sum of a curve that all classes share and of six Gaussian bumps of its own, a
    quarter as high. The brightness a of a pixel is normal with mean 1 and standard deviation 0.1. The noise e has
    standard deviation 1 and is smooth along the bands (a moving average of nine), like sensor errors and mixed pixels;
    noise that is independent in each band would average out over 220 bands.

    Args:
        sizes: number of pixels by split name, drawn disjoint and stratified. All classes have equally many pixels (to
            within one).
        num_classes: k.
        image_shape: (d,).
        noise: standard deviation of the noise; the spectra of the classes differ by about 0.25.
        seed: seed of spectra, pixels and splits.

    Raises:
        ConfigError: fewer pixels than classes, or `image_shape` is not one number.

    Source: a replacement for the data of Günther et al. 2020 (arXiv 1812.04352), section 5.1, test case 2.

    Example:
        >>> data = SyntheticSpectra({"train": 1000, "val": 200})
        >>> data.split("train")[0]["input"].shape, data.num_classes
        (torch.Size([220]), 16)
    """

    noise: NonNegative = 0.2

    def __post_init__(self) -> None:
        num_pixels = sum(int(size) for size in self.sizes.values())
        require(len(self.image_shape) == 1, "data.image_shape", list(self.image_shape), "[d], the number of bands")
        expected = f"at least {self.num_classes} pixels in all, one a class"
        require(num_pixels >= self.num_classes, "data.sizes", self.sizes, expected)
        generator = np.random.default_rng([self.seed, 3])
        spectra = class_spectra(self.num_classes, self.image_shape[0], generator)
        target = np.arange(num_pixels) % self.num_classes
        brightness = 1 + BRIGHTNESS_STD * generator.standard_normal((num_pixels, 1))
        errors = _smooth_noise(num_pixels, self.image_shape[0], generator)
        pixels = torch.from_numpy(brightness * spectra[target] + self.noise * errors)
        self._split(pixels, torch.from_numpy(target))


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
