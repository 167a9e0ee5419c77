"""Indian Pines: an airborne spectrometer's image of fields in Indiana, from the published .mat files."""

from collections.abc import Mapping
from math import prod
from pathlib import Path

import numpy as np
import torch

from mlotool.core.errors import ConfigError
from mlotool.core.files import at_home
from mlotool.core.settings import Count, Seed, Shape, Whole, target
from mlotool.data.spectra import AbstractSpectra

# h, w: height and width in pixels, d: bands

GROUND_TRUTH = "Indian_pines_gt.mat"
IMAGES = ("Indian_pines.mat", "Indian_pines_corrected.mat")
NUMBERS = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "single", "double")
# 145 x 145 x 220 has 4.6 million; a file that claims much more is not this data.
MAX_NUMBERS = 50_000_000


@target("data")
class IndianPines(AbstractSpectra):
    """10,249 labelled pixels with 220 spectral bands and 16 kinds of land cover, of an image of 145 x 145.

    Reads `Indian_pines_gt.mat` (0: no label, which are left out; 1 to 16) and, by the number of bands that is asked
    for, `Indian_pines.mat` (220) or `Indian_pines_corrected.mat` (200, without those that water absorbs). Of a file
    its one array of numbers is read and nothing else: cells, structs and objects are refused by their header.

    Args:
        root: the folder that holds the files.
        sizes: number of pixels by split name (`train`, `meta`, `val`, `test`), drawn disjoint and stratified.
        num_classes: 16.
        image_shape: (220,), or (200,) for the corrected file.
        seed: of the splits.

    Raises:
        ConfigError: a file is not there or holds something else; the options do not fit the data.

    Source: Baumgardner, Biehl and Landgrebe 2015, 220 Band AVIRIS Hyperspectral Image Data Set; 1,000 pixels of it in
    Günther et al. 2020 (arXiv 1812.04352), section 5.1, test case 2.
    """

    def __init__(
        self,
        root: str,
        sizes: Mapping[str, Whole],
        num_classes: Count = 16,
        image_shape: Shape = (220,),
        seed: Seed = 0,
    ) -> None:
        folder = at_home(root)
        image = _read_image(folder, tuple(image_shape))
        labels = read_array(folder / GROUND_TRUTH, num_axes=2)
        if image.shape[:2] != labels.shape:
            raise ConfigError(
                f"data.root={root}: the image has {image.shape[:2]} pixels and {GROUND_TRUTH} {labels.shape}; expected "
                "the same. Download both files again."
            )
        target = torch.from_numpy(labels.astype(np.int64))
        pixels = torch.from_numpy(image.astype(np.float64))
        has_label = target > 0
        super().__init__(pixels[has_label], target[has_label] - 1, sizes, num_classes, image_shape, seed)


def _read_image(folder: Path, image_shape: tuple[int, ...]) -> np.ndarray:
    """Return the image (h, w, d) of the file with as many bands as are asked for, or else of the first."""
    paths = [folder / name for name in IMAGES if (folder / name).is_file()]
    if not paths:
        raise ConfigError(
            f"data.root={folder}: there is neither {' nor '.join(IMAGES)}; expected one of them and {GROUND_TRUTH}. "
            "Download them (Indian Pines, AVIRIS), and set data.root to their folder."
        )
    images = [read_array(path, num_axes=3) for path in paths]
    return next((image for image in images if image.shape[2:] == image_shape), images[0])


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
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "iuf" or array.ndim != num_axes:
        found = ", ".join(f"{name}: {kind} {list(shape)}" for name, shape, kind in held) or "nothing"
        raise ConfigError(
            f"{path} holds {found}; expected one array of numbers with {num_axes} axes. Download it again."
        )
    return array
