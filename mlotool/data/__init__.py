"""Data sets with train, meta, val and test splits, long tails and wrong labels; all of them images with one label."""

from mlotool.data.augmentation import CropAndFlip
from mlotool.data.cifar10 import CIFAR10
from mlotool.data.digits import Digits
from mlotool.data.image_folder import ImageFolder
from mlotool.data.in_memory import InMemoryDataset, Normalization
from mlotool.data.label_noise import corrupt_labels
from mlotool.data.mnist import MNIST
from mlotool.data.sampling import long_tail_counts, long_tail_indices, split_indices

__all__ = [
    "CIFAR10",
    "MNIST",
    "CropAndFlip",
    "Digits",
    "ImageFolder",
    "InMemoryDataset",
    "Normalization",
    "corrupt_labels",
    "long_tail_counts",
    "long_tail_indices",
    "split_indices",
]
