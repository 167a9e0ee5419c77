"""Data sets with train, meta, val and test splits, long tails, wrong labels: images, texts, points, spectra, tasks."""

from mlotool.data.augmentation import CropAndFlip
from mlotool.data.cifar import CIFAR10, CIFAR100
from mlotool.data.clothing1m import Clothing1M
from mlotool.data.digits import Digits
from mlotool.data.digits_episodes import DigitsEpisodes
from mlotool.data.image_folder import ImageFolder
from mlotool.data.in_memory import InMemoryDataset, Normalization
from mlotool.data.in_memory_tensors import InMemoryTensors
from mlotool.data.indian_pines import IndianPines
from mlotool.data.label_noise import corrupt_labels
from mlotool.data.language_data import TextWindows
from mlotool.data.mnist import MNIST
from mlotool.data.office_home import OfficeHome
from mlotool.data.peaks import Peaks
from mlotool.data.python_episodes import PythonEpisodes
from mlotool.data.python_text import PythonText
from mlotool.data.sinusoids import SinusoidEpisodes
from mlotool.data.splits import long_tail_counts, long_tail_indices, split_indices
from mlotool.data.sst import SST
from mlotool.data.synthetic_classification import SyntheticClassification
from mlotool.data.synthetic_spectra import SyntheticSpectra
from mlotool.data.synthetic_text import SyntheticText
from mlotool.data.text_data import LabelModel, hard_labels, label_model, majority_vote
from mlotool.data.text_folder import TextFolder
from mlotool.data.two_domains import TwoDomains
from mlotool.data.vocabulary import Vocabulary
from mlotool.data.wrench import Wrench

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "MNIST",
    "SST",
    "Clothing1M",
    "CropAndFlip",
    "Digits",
    "DigitsEpisodes",
    "ImageFolder",
    "InMemoryDataset",
    "InMemoryTensors",
    "IndianPines",
    "LabelModel",
    "Normalization",
    "OfficeHome",
    "Peaks",
    "PythonEpisodes",
    "PythonText",
    "SinusoidEpisodes",
    "SyntheticClassification",
    "SyntheticSpectra",
    "SyntheticText",
    "TextFolder",
    "TextWindows",
    "TwoDomains",
    "Vocabulary",
    "Wrench",
    "corrupt_labels",
    "hard_labels",
    "label_model",
    "long_tail_counts",
    "long_tail_indices",
    "majority_vote",
    "split_indices",
]
