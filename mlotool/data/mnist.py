"""MNIST, from the files that it was published in."""

from dataclasses import dataclass, field

from mlotool.core.settings import Count, Shape, target
from mlotool.data.image_data import AbstractImageData, CropAndFlip, FromTorchvision, Normalization, Part


@target("data")
@dataclass(eq=False)
class MNIST(AbstractImageData, FromTorchvision):
    """60,000 + 10,000 handwritten digits of 28 x 28 pixels, read from `root/MNIST/raw`.

    Args:
        root: the folder that holds `MNIST/`.
        sizes: number of samples by split name; see `AbstractImageData`.
        num_classes: 10.
        image_shape: (1, 28, 28).
        seed: seed of splits and noise.
        imbalance_factor: factor between the most common and the rarest class of `train`, or None; see
            `long_tail_counts`.
        label_noise: wrong labels in `train`, `{kind: uniform | flip, rate: 0 .. 1}`, or None; see `corrupt_labels`.
        download: whether missing files are downloaded into `root`.
        augment: whether `train` has random crops (padding 2).

    Raises:
        ConfigError: the files are not there; the options do not fit the data.

    Source: LeCun et al. 1998, Gradient-Based Learning Applied to Document Recognition.
    """

    reader = "MNIST"
    num_classes: Count = 10
    image_shape: Shape = (1, 28, 28)
    augment: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        files = (
            "MNIST/raw/ with the four unpacked files train-images-idx3-ubyte, train-labels-idx1-ubyte, "
            "t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte"
        )
        train, test = (Part(part.data[:, None], part.targets.long()) for part in self._published(files))
        augmentation = CropAndFlip(padding=2, flip=False) if self.augment else None
        self._split(train, test, Normalization(mean=[0.1307], std=[0.3081]), augmentation)
