"""A setting that changes from step to step by a factor: a penalty coefficient that grows, a rate that falls."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlotool.core.arguments import is_number, is_whole
from mlotool.core.errors import ConfigError


@dataclass(frozen=True)
class StepSchedule:
    """A number that changes from step to step: `min(start factor^(step // every), maximum)`.

    Args:
        start: its value at the first step.
        factor: by which it is multiplied.
        every: steps from one multiplication to the next.
        maximum: value at which it stays.

    Example:
        >>> beta = StepSchedule.of({"start": 1.0, "factor": 2.0, "every": 10, "maximum": 3.0}, "parallel.beta")
        >>> beta.at(0), beta.at(10), beta.at(20)
        (1.0, 2.0, 3.0)
    """

    start: float
    factor: float = 1.0
    every: int = 1
    maximum: float = float("inf")

    @staticmethod
    def of(value: "float | Mapping[str, float] | StepSchedule", key: str) -> "StepSchedule":
        """Return the schedule that a user has set; a number stays the same.

        Args:
            value: a number, or a mapping with `start` and any of `factor`, `every`, `maximum`.
            key: of the setting, for messages.

        Raises:
            ConfigError: there is no `start`, an unknown entry, or a value out of range.
        """
        if isinstance(value, StepSchedule):
            return value
        known = ("start", "factor", "every", "maximum")
        if isinstance(value, Mapping) and ("start" not in value or not set(value) <= set(known)):
            raise ConfigError(
                f"{key}: found {dict(value)}; expected a number, or {{start: .., factor: .., every: .., maximum: ..}}. "
                f"Correct {key}."
            )
        entries: dict[str, Any] = dict(value) if isinstance(value, Mapping) else {"start": value}
        every = entries.pop("every", 1)
        is_endless = entries.get("start") == math.inf or entries.get("factor") == math.inf
        if is_endless or not all(map(_is_above_zero, entries.values())) or not is_whole(every, 1):
            wanted = "start, factor and maximum above 0, and a whole number of at least 1 for every"
            wanted = wanted if isinstance(value, Mapping) else "a number above 0"
            raise ConfigError(f"{key}: found {value!r}; expected {wanted}. Correct {key}.")
        return StepSchedule(every=every, **{name: float(each) for name, each in entries.items()})

    def at(self, step: int) -> float:
        """Return the value at a step, counted from 0."""
        try:
            return min(self.start * self.factor ** (step // self.every), self.maximum)
        except OverflowError:
            return self.maximum


def _is_above_zero(value: Any) -> bool:
    try:
        return is_number(value) and float(value) > 0.0
    except OverflowError:
        return False
