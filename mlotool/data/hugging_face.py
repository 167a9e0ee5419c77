"""Data sets of Hugging Face's `datasets` from a folder."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mlotool.core.errors import ConfigError
from mlotool.core.settings import Count, target
from mlotool.data.splits import AbstractData, check_literal, require_known
from mlotool.folders.files import at_home


@target("data")
@dataclass(eq=False)
class SavedDataset(AbstractData[Any]):
    """The splits of a data set that `save_to_disk` of Hugging Face's `datasets` has written.

    A column of numbers, or of lists of numbers of equal length, becomes a tensor (b, ...) of a batch.

    Args:
        folder: the folder of a saved DatasetDict, or of a Dataset, whose rows become the split `train`.
        columns: new names of columns, by their old names: {text: input, label: target}.
        num_classes: number of classes, which models and metrics refer to; null: that of the column `target`, if it is a
            ClassLabel.

    Raises:
        ConfigError: the package `datasets` is not installed, or the folder has no data set.
    """

    folder: str
    columns: Mapping[str, str] = field(default_factory=dict)
    num_classes: Count | None = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        try:
            from datasets import load_from_disk
        except ImportError as error:
            fault = "data: SavedDataset needs the package datasets, which is not installed"
            raise ConfigError(f"{fault}; expected it. Write pip install datasets.") from error
        try:
            loaded: Any = load_from_disk(str(at_home(self.folder)))
        except FileNotFoundError as error:
            fault = f"data.folder={self.folder}: {error}"
            raise ConfigError(f"{fault}; expected what save_to_disk has written. Correct data.folder.") from error
        splits = dict(loaded) if isinstance(loaded, Mapping) else {"train": loaded}
        for dataset in splits.values():
            for name in self.columns:
                require_known("data.columns", name, dataset.column_names)
        splits = {name: dataset.rename_columns(dict(self.columns)) for name, dataset in splits.items()}
        of_classes = getattr(next(iter(splits.values())).features.get("target"), "num_classes", None)
        if of_classes is not None and self.num_classes is not None:
            check_literal("num_classes", self.num_classes, of_classes, "the number of classes of the column 'target'")
        self.num_classes = of_classes if self.num_classes is None else self.num_classes
        super().__init__(splits)
