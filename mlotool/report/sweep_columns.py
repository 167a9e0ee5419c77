"""What differs between the jobs of a sweep, as columns of numbers or names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlotool.report.formats import NONE, number
from mlotool.report.series import LARGEST, SMALLEST

# From this ratio of the largest to the smallest value on, a column is drawn on a log scale.
LOG_RATIO = 20
DECISION = "decisions."
"""Begins the keys of decisions."""

MAX_KEYS = 200
"""Overrides that are looked at; no command line has as many."""


@dataclass(frozen=True)
class Column:
    """One hyperparameter.

    Args:
        key: of the override.
        label: the shortest end of the key that no other column has.
        texts: each value as it was written; None where it is not known.
        is_drawn_by_logarithm: whether the sweep drew its values so.
    """

    key: str
    label: str
    texts: tuple[str | None, ...]
    is_drawn_by_logarithm: bool = False

    @property
    def numbers(self) -> tuple[float, ...] | None:
        """The values as numbers; None where one of them is none."""
        found = [as_number(text) for text in self.texts]
        known = tuple(each for each in found if each is not None)
        return known if len(known) == len(found) else None

    @property
    def names(self) -> list[str]:
        """The different values in the order in which they are drawn: numbers by size, then words."""
        different = dict.fromkeys(NONE if text is None else text for text in self.texts)

        def order(name: str) -> tuple[bool, float, str]:
            value = as_number(name)
            return (value is None, value or 0.0, name)

        return sorted(different, key=order)

    @property
    def is_log(self) -> bool:
        """Whether only a log scale shows its values as what they are."""
        numbers = self.numbers
        if not numbers or min(numbers) <= SMALLEST:
            return False
        return self.is_drawn_by_logarithm or max(numbers) >= LOG_RATIO * min(numbers)

    def take(self, indices: Sequence[int]) -> "Column":
        """Return the column of some of the settings."""
        texts = tuple(self.texts[index] for index in indices)
        return Column(self.key, self.label, texts, self.is_drawn_by_logarithm)


def as_number(text: str | None) -> float | None:
    """Return the number that a text is, or None; one as good as infinite is a word."""
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if abs(value) < LARGEST else None


def shown(text: str | None) -> str:
    """Return a value as a table shows it: numbers with four significant digits."""
    if text is None:
        return NONE
    value = as_number(text)
    return text if value is None else number(value)


def split_keys(parameters: Sequence[Mapping[str, str]]) -> tuple[list[str], dict[str, str]]:
    """Return the keys that differ between jobs, in the order of the command line, and those with one value for all.

    A job that does not say (it has only begun, or died while it started) makes nothing differ. But of jobs with
    decisions those differ that have one which others were not asked for.
    """
    keys = list(dict.fromkeys(key for each in parameters for key in each))[:MAX_KEYS]
    values: dict[str, set[str | None]] = {key: {each[key] for each in parameters if key in each} for key in keys}
    decided = [each for each in parameters if any(key.startswith(DECISION) for key in each)]
    for key in keys:
        if key.startswith(DECISION) and any(key not in each for each in decided):
            values[key].add(None)
    return [key for key in keys if len(values[key]) > 1], {
        key: str(values[key].pop()) for key in keys if len(values[key]) == 1
    }


def labels(keys: Sequence[str]) -> dict[str, str]:
    """Return for each key the shortest end of it that is its alone."""
    return {key: _label(key, keys) for key in keys}


def _label(key: str, keys: Sequence[str]) -> str:
    """Return the shortest end of a dotted key that is its alone, of two parts where there are as many."""
    parts = key.split(".")
    # `decisions.` says no more than the table does.
    if key.startswith(DECISION) and sum(f".{other}".endswith(f".{parts[-1]}") for other in keys) == 1:
        return parts[-1]
    for count in range(min(2, len(parts)), len(parts)):
        end = ".".join(parts[-count:])
        if sum(f".{other}".endswith(f".{end}") for other in keys) == 1:
            return end
    return key
