"""Data sets of Hugging Face's, which stand-ins of the same interface take the place of here."""

import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import Subset

from mlotool.config.user_data import limited
from mlotool.core.errors import ConfigError
from mlotool.data import SavedDataset
from mlotool.problem.streams.stream import Stream


class Rows:
    """Rows of Python values, as `datasets.Dataset` gives them."""

    def __init__(self, columns: dict[str, list[Any]]) -> None:
        self.columns = columns
        self.column_names = [*columns]
        self.features = {name: SimpleNamespace(num_classes=3) for name in columns if name in ("label", "target")}

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: values[index] for name, values in self.columns.items()}

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        return [self[int(index)] for index in indices]

    def rename_columns(self, names: dict[str, str]) -> "Rows":
        return Rows({names.get(name, name): values for name, values in self.columns.items()})


Rows.__module__ = "datasets.arrow_dataset"
ROWS = Rows(
    {
        "ids": [[1, 2, 3], [4, 5, 6], [7, 8, 9]],
        "label": [0, 1, 2],
        "share": [0.5, 1.5, 2.5],
        "text": ["a", "b", "c"],
        "pair": [[[1.0], [2.0]]] * 3,
    }
)


@pytest.mark.parametrize("wrapped", [ROWS, Subset(ROWS, [0, 1, 2]), limited(ROWS, 3)])  # type: ignore[arg-type]
def test_lists_of_numbers_come_as_tensors(wrapped: Any) -> None:
    batch = Stream(wrapped, 2, shuffle=False).next()
    torch.testing.assert_close(batch["ids"], torch.tensor([[1, 2, 3], [4, 5, 6]]))
    torch.testing.assert_close(batch["label"], torch.tensor([0, 1]))
    torch.testing.assert_close(batch["share"], torch.tensor([0.5, 1.5]))
    torch.testing.assert_close(batch["pair"], torch.tensor([[[1.0], [2.0]]] * 2))
    assert batch["text"] == ["a", "b"]


def test_a_collate_fn_gets_the_rows_as_they_are() -> None:
    def collate(rows: list[dict[str, Any]]) -> list[Any]:
        return [row["ids"] for row in rows]

    assert Stream(ROWS, 2, shuffle=False, collate_fn=collate).next() == [[1, 2, 3], [4, 5, 6]]
    limited_rows = limited(ROWS, 2)
    assert Stream(limited_rows, 2, shuffle=False, collate_fn=collate).next()[0] == [1, 2, 3]


def test_a_saved_data_set_has_its_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    package: Any = ModuleType("datasets")
    monkeypatch.setitem(sys.modules, "datasets", package)
    package.load_from_disk = lambda folder: {"train": ROWS, "val": ROWS}
    data = SavedDataset("saved", columns={"ids": "input", "label": "target"})
    assert (data.splits, data.num_classes) == (("train", "val"), 3)
    assert Stream(data.split("val"), 2, shuffle=False).next()["input"].shape == (2, 3)
    with pytest.raises(ConfigError, match=r"data.columns: found 'id'; expected some of ids, "):
        SavedDataset("saved", columns={"id": "input"})
    package.load_from_disk = lambda folder: ROWS
    assert SavedDataset("saved").splits == ("train",)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match="needs the package datasets"):
        SavedDataset("saved")
