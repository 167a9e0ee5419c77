"""Data sets with train, meta, val and test splits, long tails, wrong labels: images, texts, points, spectra, tasks."""

from typing import TYPE_CHECKING, Any

from mlotool.core.settings import discover
from mlotool.data.image_data import CropAndFlip, InMemoryDataset, Normalization, corrupt_labels
from mlotool.data.language_data import TextWindows
from mlotool.data.splits import InMemoryTensors, long_tail_counts, long_tail_indices, split_indices
from mlotool.data.text_data import LabelModel, Vocabulary, hard_labels, label_model, majority_vote

_targets = discover(__name__)
globals().update(_targets)
__all__ = ["CropAndFlip", "InMemoryDataset", "InMemoryTensors", "LabelModel", "Normalization", "TextWindows"]
__all__ += ["Vocabulary", "corrupt_labels", "hard_labels", "label_model", "long_tail_counts", "long_tail_indices"]
__all__ += ["majority_vote", "split_indices"]
__all__ += _targets

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
