"""Tables: what their columns become, beside scikit-learn; splits, errors, and a config that they fill in."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from mlotool.config.composition import compose, with_values
from mlotool.core.errors import ConfigError
from mlotool.data import Table

GENERATOR = np.random.default_rng(0)
AREA = GENERATOR.uniform(20, 200, 60)
KIND = GENERATOR.choice(["flat", "house", ""], 60)
ROOMS = [None if row % 7 == 0 else int(value) for row, value in enumerate(GENERATOR.integers(1, 6, 60))]
PRICE = AREA * 2000.5
GOOD = np.where(np.median(PRICE) < PRICE, "yes", "no")


@pytest.fixture
def path(tmp_path: Path) -> str:
    rows = zip(AREA, ROOMS, KIND, PRICE, GOOD, strict=True)
    lines = [",".join("" if value is None else str(value) for value in row) for row in rows]
    (tmp_path / "mine.csv").write_text("\n".join(["area,rooms,kind,price,good", *lines]))
    return str(tmp_path / "mine.csv")


def all_of(data: Table, name: str) -> dict[str, Any]:
    dataset = data.split(name)
    return dataset.__getitems__(range(len(dataset)))


def row_numbers(data: Table, name: str) -> np.ndarray:
    """Return where the rows of a split stand, by the target that is another one in each row."""
    targets = all_of(data, name)["target"][:, 0].double() * data.target_std + data.target_mean
    return np.abs(targets.numpy()[:, None] - PRICE[None]).argmin(axis=1)


def test_columns_are_what_scikit_learn_makes_of_them(path: str) -> None:
    data = Table(path, "price", ignore=["good"], fractions={"train": 0.5, "val": 0.5})
    assert data.columns == ["area", "rooms", "rooms is missing", "kind=flat", "kind=house", "kind=missing"]
    assert (data.num_classes, data.image_shape, data.sizes) == (1, [6], {"val": 30, "train": 30})
    train = row_numbers(data, "train")
    rooms = np.array([np.nan if value is None else value for value in ROOMS], dtype=float)
    numbers = np.stack([AREA, rooms], axis=1)
    scaler = StandardScaler().fit(numbers[train])
    expected = np.nan_to_num(scaler.transform(numbers), nan=0.0)
    kinds = OneHotEncoder(categories=[["flat", "house", ""]], sparse_output=False).fit_transform(KIND[:, None])
    expected = np.concatenate([expected, np.isnan(rooms)[:, None], kinds], axis=1)
    for name in ("train", "val"):
        rows, batch = row_numbers(data, name), all_of(data, name)
        np.testing.assert_allclose(batch["input"].numpy(), expected[rows], rtol=1e-5, atol=1e-6)
        assert [data.categories["kind"][code] for code in batch["category"][:, 0]] == [
            kind or "missing" for kind in KIND[rows]
        ]
        assert batch["index"].tolist() == [*range(30)]
    assert data.target_mean == pytest.approx(PRICE[train].mean())
    assert data.target_std == pytest.approx(PRICE[train].std())
    assert sorted([*train, *row_numbers(data, "val")]) == [*range(60)]


def test_a_frame_of_pandas_gives_what_its_file_does(path: str) -> None:
    class Column(list[Any]):
        def tolist(self) -> list[Any]:
            return list(self)

        def isna(self) -> "Column":
            return Column([value is None for value in self])

    class Frame(dict[str, Column]):
        columns = property(dict.keys)

    kinds = [str(kind) or None for kind in KIND]
    columns = {"area": AREA, "rooms": ROOMS, "kind": kinds, "price": PRICE, "good": GOOD}
    frame = Frame({name: Column(values) for name, values in columns.items()})
    ours, theirs = (all_of(Table(source, "good", ignore=["price"]), "train") for source in (frame, path))
    for name, values in theirs.items():
        assert torch.equal(ours[name], values)


def test_classes_and_splits(path: str) -> None:
    data = Table(path, "good", ignore=["price"], one_hot=False, standardize=False, categorical=["rooms"], seed=1)
    assert (data.classes, data.num_classes, data.sizes) == (
        ["no", "yes"],
        2,
        {"meta": 6, "test": 6, "val": 6, "train": 42},
    )
    assert [int(all_of(data, name)["target"].sum()) for name in data.splits] == [3, 3, 3, 21]
    assert data.categories == {"rooms": ["1", "2", "3", "4", "5", "missing"], "kind": ["flat", "house", "missing"]}
    assert sorted(float(x) for name in data.splits for x in all_of(data, name)["input"]) == pytest.approx(sorted(AREA))


def test_a_column_may_name_the_splits_and_rows_without_a_target_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "split.csv"
    file.write_text("part;x;y\ntrain;1;0\nheld;2;1\ntrain;3;1\ntrain;5;?\n")
    with pytest.warns(UserWarning, match="data.target=y: 1 rows without a target are left out"):
        data = Table(str(file), "y", split_column="part", delimiter=";")
    assert (data.splits, data.columns, data.classes) == (("train", "held"), ["x"], ["0", "1"])
    assert all_of(data, "train")["input"].tolist() == [[-1.0], [1.0]]
    assert all_of(data, "held")["input"].tolist() == [[0.0]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target": "prize"}, r"data: column: found 'prize'; .*Did you mean 'price'"),
        ({"numeric": ["kind"]}, "data.numeric: found '(flat|house)' in the column 'kind'; expected numbers"),
        ({"target": "good", "task": "regression"}, "data.target=good: found '(yes|no)'; expected numbers"),
        ({"max_categories": 1}, r"data: categories of 'kind': found 2; .*data.ignore=\[kind\]"),
        ({"fractions": {"train": 0.9, "val": 0.2}}, "data.fractions: found .*; expected a sum of at most 1"),
        ({"fractions": {"val": 1.0}}, "data: splits with rows: found .*; expected train among them"),
        ({"image_shape": [3]}, r"data.image_shape=\[3\]; expected \[8\], the columns of the input of the table"),
        ({"delimiter": ";"}, "data: column: found 'price'"),
        ({"path": "nowhere.csv"}, "data.path: found 'nowhere.csv'; expected a CSV file"),
    ],
)
def test_what_is_wrong_is_told(path: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Table(**{"path": path, "target": "price", **settings})


def test_a_row_that_does_not_fit_the_header_is_told(tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n3\n")
    with pytest.raises(ConfigError, match="values in row 3: found 1; expected 2, as in the header"):
        Table(str(tmp_path / "bad.csv"), "b")


def test_a_config_gets_what_models_are_sized_by(path: str) -> None:
    words = ["data=table", f"data.path={path}", "data.target=good", "data.ignore=[price]"]
    config = compose("plain", words)
    assert (config.data.num_classes, config.data.image_shape, config.data.sizes.train) == (2, [6], 42)
    assert config.problems.classifier.module.image_shape == [6]
    assert with_values(config, ["data.target=kind"]) is None
    assert with_values(config, ["seed=3"]) is not None
