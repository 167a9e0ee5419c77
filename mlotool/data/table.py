"""A table of your own: a CSV file or a pandas DataFrame, with one sample per row."""

import csv
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from mlotool.core.arguments import is_path, require
from mlotool.core.errors import ConfigError
from mlotool.core.settings import Count, Seed, Shape, Share, Whole, target
from mlotool.data.splits import AbstractData, InMemoryTensors, check_literal, require_known, split_indices
from mlotool.folders.files import at_home

# n: rows, b: batch, d: columns of the input, c: columns of categories

# In a file, whatever their case.
MISSING = ("", "na", "n/a", "nan", "null", "none", "?")
# Whole numbers of so many values at most are classes.
MAX_CLASSES = 20
_SPLITS = {"train": 0.7, "meta": 0.1, "val": 0.1, "test": 0.1}
# By name, a value a row; None is missing.
Columns = dict[str, list[Any]]


@target("data")
@dataclass(eq=False)
class Table(AbstractData[InMemoryTensors]):
    """Rows of a table, with one column as the target.

    Batches are `{"input": (b, d) float32, "target": .., "index": (b,)}`, and with c columns of categories also
    `"category": (b, c) int64`, the number of the category in each of these columns.

    - A column of numbers is standardized by the mean and the standard deviation of the training split. A missing number
      becomes that mean, and the input gets a column that is 1 where it was missing.
    - Any other column has categories; a missing value is a category too. With `one_hot`, each category has a column in
      the input that is 1 for the rows of that category.
    - The target is a class (b,) int64, or a number (b, 1) float32, which is standardized too. Rows without a target are
      left out.

    Args:
        path: a CSV file with a header, or a pandas DataFrame.
        target: the column to predict.
        task: `regression` or `classification`; null: regression if the target has numbers that are not whole, or more
            than 20 different numbers, else classification.
        fractions: fraction of the rows by split name. Rows are drawn at random; in classification, each split has the
            classes in the same proportions. `train` gets the rows that rounding leaves over.
        split_column: a column with the name of each row's split, in place of `fractions`.
        numeric: columns of numbers; a column that is named nowhere has numbers if all its values are numbers.
        categorical: columns of categories, even if all their values are numbers.
        ignore: columns that are left out.
        one_hot: whether categories are part of the input; false: they are in `category` only.
        standardize: whether numbers, including those of the target, are standardized.
        max_categories: the most categories of a column; a column with more, such as one of names or texts, is an error.
        delimiter: the character between the values of a file.
        num_classes: number of outputs, 1 in regression; null: as in the table.
        image_shape: [d], the shape of one input; null: as in the table.
        sizes: number of rows by split name; null: as in the table.
        seed: seed of the splits.

    Attributes:
        columns: names of the columns of the input, d.
        categories: names of the categories by column, in the order of their numbers.
        classes: names of the classes; empty in regression.
        target_mean: mean of the target in the training split; `prediction * target_std + target_mean` is in the
            target's own unit.
        target_std: standard deviation of the target in the training split.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        ...     rows = ["area,kind,price", *(f"{i}.5,{'ab'[i % 2]},{2 * i}.5" for i in range(10))]
        ...     _ = file.write("\\n".join(rows))
        ...     file.flush()
        ...     data = Table(file.name, "price", fractions={"train": 0.8, "val": 0.2})
        >>> data.columns, data.num_classes, data.sizes
        (['area', 'kind=a', 'kind=b'], 1, {'val': 2, 'train': 8})
        >>> batch = data.split("val").__getitems__([0, 1])
        >>> batch["input"].shape, batch["target"].shape, batch["category"].shape
        (torch.Size([2, 3]), torch.Size([2, 1]), torch.Size([2, 1]))
    """

    path: Any
    target: str
    task: Literal["regression", "classification"] | None = None
    fractions: Mapping[str, Share] = field(default_factory=lambda: dict(_SPLITS))
    split_column: str | None = None
    numeric: Sequence[str] = ()
    categorical: Sequence[str] = ()
    ignore: Sequence[str] = ()
    one_hot: bool = True
    standardize: bool = True
    max_categories: Count = 100
    delimiter: str = ","
    num_classes: Count | None = None  # type: ignore[assignment]
    image_shape: Shape | None = None
    sizes: Mapping[str, Whole] | None = None
    seed: Seed = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        table = _read_frame(self.path) if hasattr(self.path, "columns") else _read_file(self.path, self.delimiter)
        named = [self.target, *filter(None, [self.split_column]), *self.numeric, *self.categorical, *self.ignore]
        for name in named:
            require_known("data: column", name, list(table))
        table = self._with_target(table)
        goal, self.classes = self._goal(table.pop(self.target))
        rows = self._rows(table.pop(self.split_column) if self.split_column else None, goal)
        for name in self.ignore:
            table.pop(name, None)
        is_train = np.zeros(len(goal), dtype=bool)
        is_train[rows["train"].numpy()] = True
        self.target_mean, self.target_std = 0.0, 1.0
        if not self.classes:
            if self.standardize:
                self.target_mean, self.target_std = _statistics(goal[is_train])
            goal = ((goal - self.target_mean) / self.target_std).astype(np.float32)[:, None]
        self.columns: list[str] = []
        self.categories: dict[str, list[str]] = {}
        inputs, codes = self._inputs(table, is_train)
        values = {"input": torch.from_numpy(inputs), "target": torch.from_numpy(goal)}
        if self.categories:
            values["category"] = torch.from_numpy(codes)
        self._tell(rows)
        super().__init__(
            {
                name: InMemoryTensors({key: value[index] for key, value in values.items()})
                for name, index in rows.items()
            }
        )

    def _tell(self, rows: Mapping[str, torch.Tensor]) -> None:
        """Set what models are sized by, or check it where it was given."""
        actual = {"num_classes": len(self.classes) or 1, "image_shape": [len(self.columns)]}
        actual["sizes"] = {name: len(index) for name, index in rows.items()}
        what = {"num_classes": "the number of outputs", "image_shape": "the columns of the input", "sizes": "the rows"}
        for key, value in actual.items():
            given = getattr(self, key)
            given = list(given) if key == "image_shape" and given is not None else given
            if given is not None:
                check_literal(key, given, value, f"{what[key]} of the table")
            setattr(self, key, value)

    def _with_target(self, table: Columns) -> Columns:
        is_there = [value is not None for value in table[self.target]]
        num_missing = is_there.count(False)
        if num_missing:
            warnings.warn(f"data.target={self.target}: {num_missing} rows without a target are left out.", stacklevel=6)
        require(any(is_there), "data.target", self.target, "a column with values", "Correct the table.")
        keep = np.flatnonzero(is_there)
        return {name: [values[row] for row in keep] for name, values in table.items()}

    def _goal(self, values: Sequence[Any]) -> tuple[np.ndarray, list[str]]:
        """Return the target, and the names of the classes."""
        numbers = _numbers(values)
        is_whole = numbers is not None and bool((numbers == numbers.round()).all())
        is_few = is_whole and len(np.unique(numbers)) <= MAX_CLASSES  # type: ignore[arg-type]
        task = self.task or ("regression" if numbers is not None and not is_few else "classification")
        if task == "regression":
            if numbers is None:
                wrong = next(value for value in values if _number(value) is None)
                raise ConfigError(f"data.target={self.target}: found {wrong!r}; expected numbers. Correct data.task.")
            return numbers, []
        if is_whole:
            values = [int(value) for value in numbers]  # type: ignore[union-attr]
        names = sorted(set(values), key=lambda value: (isinstance(value, str), value if is_whole else str(value)))
        places = {name: place for place, name in enumerate(names)}
        return np.array([places[value] for value in values]), [str(name) for name in names]

    def _rows(self, column: Sequence[Any] | None, goal: np.ndarray) -> dict[str, torch.Tensor]:
        """Return the rows of each split."""
        if column is None:
            total = sum(self.fractions.values())
            require(total < 1 + 1e-9, "data.fractions", dict(self.fractions), "a sum of at most 1", "Lower one.")
            # 1e-9: 0.1 * 30 is a little more than 3.
            sizes = {name: math.floor(share * len(goal) + 1e-9) for name, share in self.fractions.items()}
            if total > 1 - 1e-9 and "train" in sizes:
                sizes["train"] += len(goal) - sum(sizes.values())
            labels = torch.from_numpy(goal) if self.classes else torch.zeros(len(goal), dtype=torch.int64)
            rows = split_indices(labels, sizes, self.seed)
        else:
            key = f"data.split_column={self.split_column}"
            require(None not in column, key, None, "the name of a split in each row", "Correct the table.")
            names = [str(name) for name in column]
            rows = {
                name: torch.tensor([row for row, own in enumerate(names) if own == name])
                for name in dict.fromkeys(names)
            }
        advice = "Give train some rows: numbers are standardized by its statistics."
        require("train" in rows, "data: splits with rows", list(rows), "train among them", advice)
        return rows

    def _inputs(self, table: Columns, is_train: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the input (n, d) and the categories (n, c), and note their names."""
        numbers, indicators, codes = [], [], []
        for name, values in table.items():
            column = None if name in self.categorical else _numbers(values)
            if column is None and name in self.numeric:
                wrong = next(value for value in values if value is not None and _number(value) is None)
                raise ConfigError(
                    f"data.numeric: found {wrong!r} in the column '{name}'; expected numbers. Correct it."
                )
            if column is None:
                codes.append(self._codes(name, values))
                continue
            is_missing = np.isnan(column)
            mean, deviation = _statistics(column[is_train])
            column = np.where(is_missing, mean, column)
            numbers.append((column - mean) / deviation if self.standardize else column)
            self.columns.append(name)
            if is_missing.any():
                indicators.append(is_missing)
                self.columns.append(f"{name} is missing")
                numbers.append(is_missing.astype(float))
        for (name, names), own in zip(self.categories.items(), codes, strict=True):
            if self.one_hot:
                self.columns += [f"{name}={category}" for category in names]
                numbers += [(own == place).astype(float) for place in range(len(names))]
        advice = "Name fewer columns in data.ignore, or set data.one_hot=true."
        require(bool(numbers), "data: columns of the input", self.columns, "one at least", advice)
        inputs = np.stack(numbers, axis=1).astype(np.float32)
        return inputs, np.stack(codes, axis=1) if codes else np.zeros((len(is_train), 0), dtype=np.int64)

    def _codes(self, name: str, values: Sequence[Any]) -> np.ndarray:
        """Return the number of each row's category; that of missing ones is the last."""
        names = sorted({str(value) for value in values if value is not None})
        expected = f"at most {self.max_categories}, data.max_categories"
        advice = f"Leave it out by data.ignore=[{name}], or raise data.max_categories."
        require(len(names) <= self.max_categories, f"data: categories of '{name}'", len(names), expected, advice)
        places = {name: place for place, name in enumerate(names)}
        self.categories[name] = [*names, *(["missing"] if None in values else [])]
        return np.array([len(names) if value is None else places[str(value)] for value in values])


def _statistics(values: np.ndarray) -> tuple[float, float]:
    """Return mean and standard deviation of what is there; 0 and 1 where nothing is, 1 of what is constant."""
    there = values[~np.isnan(values)]
    if not len(there):
        return 0.0, 1.0
    return float(there.mean()), float(there.std()) or 1.0


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _numbers(values: Sequence[Any]) -> np.ndarray | None:
    """Return the numbers of a column, NaN where one is missing; None where some value is no finite number."""
    numbers = [math.nan if value is None else _number(value) for value in values]
    is_right = all(x is not None and not math.isinf(x) for x in numbers) and any(value is not None for value in values)
    return np.array(numbers, dtype=np.float64) if is_right else None


def _read_frame(frame: Any) -> Columns:
    """Return the columns of a DataFrame."""
    return {
        str(name): [
            None if is_missing else value
            for value, is_missing in zip(frame[name].tolist(), frame[name].isna().tolist(), strict=True)
        ]
        for name in frame.columns
    }


def _read_file(path: Any, delimiter: str) -> Columns:
    """Return the columns of a CSV file.

    Raises:
        ConfigError: there is no such file, or its rows do not fit its header.
    """
    require(is_path(path), "data.path", path, "a CSV file, or a pandas DataFrame")
    file = at_home(path)
    require(file.is_file(), "data.path", str(path), "a CSV file", "Put it there, or correct data.path.")
    try:
        with file.open(newline="", encoding="utf-8-sig") as lines:
            reader = csv.reader(lines, delimiter=delimiter)
            header, rows = [name.strip() for name in next(reader, [])], [row for row in reader if row]
    except (UnicodeDecodeError, csv.Error, TypeError) as error:
        expected = f"a CSV file in UTF-8 whose values are divided by {delimiter!r}"
        raise ConfigError(f"data.path={path}: {error}; expected {expected}. Correct data.delimiter or it.") from error
    twice = [name for name in header if header.count(name) > 1]
    require(bool(header) and not twice, f"data.path={path}: header", twice or header, "names of columns, each once")
    for number, row in enumerate(rows, start=2):
        key, expected = f"data.path={path}: values in row {number}", f"{len(header)}, as in the header"
        require(len(row) == len(header), key, len(row), expected, "Correct it, or set data.delimiter.")
    stripped = [[value.strip() for value in row] for row in rows]
    require(bool(stripped), f"data.path={path}: rows", 0, "one at least")
    return {
        name: [None if value.lower() in MISSING else value for value in values]
        for name, values in zip(header, zip(*stripped, strict=True), strict=True)
    }
