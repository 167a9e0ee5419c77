"""What a number has to be, and the numbers of a node that are not."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Range:
    """What a number has to be.

    Args:
        low: the least one.
        above: whether it has to be more than `low`.
        below: what it has to be less than.
        most: the largest one.
        whole: whether it has no fraction.
    """

    low: float = 0.0
    above: bool = False
    below: float = math.inf
    most: float = math.inf
    whole: bool = False

    def holds(self, value: float) -> bool:
        """Say whether a number is in the range; NaN and infinity never are."""
        is_high_enough = value > self.low if self.above else value >= self.low
        return -math.inf < value < math.inf and is_high_enough and value < self.below and value <= self.most

    def __str__(self) -> str:
        what = "a whole number" if self.whole else "a number"
        if self.low == -math.inf:
            return f"{what} that is finite"
        low = f" greater than {self.low:g}" if self.above else f" of at least {self.low:g}"
        if self.below < math.inf:
            return f"{what}{low} and less than {self.below:g}"
        return f"{what}{low}{f' and at most {_shown(self.most)}' if self.most < math.inf else ''}"


FINITE, POSITIVE, SHARE = Range(-math.inf), Range(above=True), Range(most=1.0)
WHOLE, COUNT = Range(whole=True), Range(1, whole=True)


def named_faults(key: str, node: Mapping[str, Any], ranges: Mapping[str, Range]) -> Iterator[str]:
    """Yield the numbers of a node, alone or in a list, that are out of the range of their name."""
    for name, wanted in ranges.items():
        value = node.get(name)
        if not all(wanted.holds(each) for each in numbers(value if isinstance(value, list) else [value])):
            of_all = " for each" if isinstance(value, list) else ""
            yield f"{key}.{name}: found {value}; expected {wanted}{of_all}. Correct {key}.{name}."


def numbers(values: Sequence[Any]) -> list[float]:
    """Return the numbers among values."""
    return [each for each in values if isinstance(each, int | float) and not isinstance(each, bool)]


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"
