"""What differs between the jobs of a sweep, as columns of numbers or names."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlotool.report.sweep import SweepRow

# From this ratio of the largest to the smallest value on, a column is drawn on a log scale.
LOG_RATIO = 20


@dataclass(frozen=True)
class Column:
    """One hyperparameter.

    Args:
        key: of the override.
        label: the shortest end of the key that no other column has.
        texts: a job's value as it was written; None where the job does not say.
        numbers: the same as numbers; None where one of them is none.
    """

    key: str
    label: str
    texts: tuple[str | None, ...]
    numbers: tuple[float, ...] | None

    @property
    def is_log(self) -> bool:
        """Whether its values span so much that only a log scale shows them."""
        return self.numbers is not None and min(self.numbers) > 0 and max(self.numbers) >= LOG_RATIO * min(self.numbers)

    def take(self, indices: Sequence[int]) -> "Column":
        """Return the column of some of the jobs."""
        numbers = None if self.numbers is None else tuple(self.numbers[index] for index in indices)
        return Column(self.key, self.label, tuple(self.texts[index] for index in indices), numbers)


def differing_columns(rows: Sequence[SweepRow]) -> list[Column]:
    """Return the overrides that not all jobs have in common, in the order of the command line."""
    values = [_overrides(row.folder) for row in rows]
    keys = dict.fromkeys(key for each in values for key in each)
    differing = [key for key in keys if len({each.get(key) for each in values}) > 1]
    return [
        Column(key, _label(key, differing), texts, _numbers(texts))
        for key in differing
        for texts in [tuple(each.get(key) for each in values)]
    ]


def _overrides(folder: Path) -> dict[str, str]:
    file = folder / "overrides.txt"
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else []
    return {key.strip(): value.strip() for key, sign, value in (line.partition("=") for line in lines) if sign}


def _label(key: str, keys: Sequence[str]) -> str:
    """Return the shortest end of a dotted key that is its alone, of two parts where there are as many."""
    parts = key.split(".")
    for count in range(min(2, len(parts)), len(parts)):
        end = ".".join(parts[-count:])
        if sum(f".{other}".endswith(f".{end}") for other in keys) == 1:
            return end
    return key


def _numbers(texts: Sequence[str | None]) -> tuple[float, ...] | None:
    try:
        return tuple(float(text or "") for text in texts)
    except ValueError:
        return None
