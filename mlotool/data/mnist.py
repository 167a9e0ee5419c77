"""MNIST, from the files that it was published in."""

from collections.abc import Mapping

from mlotool.core.settings import Count, Seed, Shape, Whole, target
from mlotool.data.image_data import (
    AbstractImageData,
    CropAndFlip,
    LabelNoise,
    Normalization,
    Part,
    SplitOptions,
    read_with_torchvision,
)
from mlotool.data.splits import ImbalanceFactor


@target("data")
class MNIST(AbstractImageData):
    """60,000 + 10,000 handwritten digits of 28 x 28 pixels, read from `root/MNIST/raw`.

    Args:
        root: the folder that holds `MNIST/`.
        sizes: see `SplitOptions`, as for the other keywords up to `label_noise`.
        num_classes: 10.
        image_shape: (1, 28, 28).
        seed: of splits and noise.
        imbalance_factor: of the long tail of `train`, or None.
        label_noise: of `train`, or None.
        download: fetch the files into `root` where they are missing.
        augment: random crops (padding 2) for `train`.

    Raises:
        ConfigError: the files are not there; the options do not fit the data.

    Source: LeCun et al. 1998, Gradient-Based Learning Applied to Document Recognition.
    """

    def __init__(
        self,
        root: str,
        sizes: Mapping[str, Whole],
        num_classes: Count = 10,
        image_shape: Shape = (1, 28, 28),
        seed: Seed = 0,
        imbalance_factor: ImbalanceFactor | None = None,
        label_noise: LabelNoise | None = None,
        download: bool = False,
        augment: bool = False,
    ) -> None:
        super().__init__(
            _read(root, is_train=True, download=download),
            _read(root, is_train=False, download=download),
            SplitOptions(sizes, num_classes, image_shape, seed, imbalance_factor, label_noise),
            Normalization(mean=[0.1307], std=[0.3081]),
            CropAndFlip(padding=2, flip=False) if augment else None,
        )


def _read(root: str, *, is_train: bool, download: bool) -> Part:
    files = (
        "MNIST/raw/ with the four unpacked files train-images-idx3-ubyte, train-labels-idx1-ubyte, "
        "t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte"
    )
    reader = read_with_torchvision("MNIST", root, is_train=is_train, download=download, files=files, instead="")
    return Part(reader.data[:, None], reader.targets.long())
