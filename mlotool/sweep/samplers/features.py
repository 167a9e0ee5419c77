"""The parameters of past trials as numbers: one-hot decisions, and a few cosines for a number."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution

from mlotool.sweep.samplers.history import Outcome
from mlotool.sweep.samplers.values import at, countable, position

Array = NDArray[np.float64]

_MOST_LEVELS = 12
"""A number with more values than that has cosines in the place of one feature a value."""
_NUM_COSINES = 4
_NUM_CANDIDATES = 64
"""Values of a long range that are looked at."""


class Parameter:
    """The features of one parameter.

    A choice has one each, and so has a number with few values. Another number at position `t` of its range, between 0
    and 1, has `1, cos(pi t), cos(2 pi t) / 2, ..`: a smooth function, whose high frequencies have small weights.

    Args:
        distributions: what its values were drawn from; a number's range is the smallest that contains theirs.
        start: where its features begin among those of a point.
    """

    def __init__(self, distributions: Sequence[BaseDistribution], start: int) -> None:
        self._range = _union(distributions)
        self._columns: dict[Any, int] | None = None
        lists = [countable(each, _MOST_LEVELS) for each in distributions]
        values = [_key(value) for each in lists if each is not None for value in each]
        if None not in lists and (self._range is None or len(set(values)) <= _MOST_LEVELS):
            self._columns = {value: column for column, value in enumerate(dict.fromkeys(values))}
        width = 1 + _NUM_COSINES if self._columns is None else len(self._columns)
        self.columns = slice(start, start + width)

    def features(self, values: Sequence[Any]) -> Array:
        """Return the features of values, of shape (num_values, num_features)."""
        if self._columns is not None:
            # A value between two levels, of a grid of fractions that was moved, has none.
            found = [self._columns.get(_key(each), -1) for each in values]
            return (np.asarray(found)[:, None] == np.arange(len(self._columns))).astype(float)
        assert self._range is not None
        where = np.array([position(self._range, each) for each in values])[:, None]
        orders = np.arange(1, _NUM_COSINES + 1)
        return np.concatenate([np.ones_like(where), np.cos(math.pi * where * orders) / orders], axis=1)

    def options(self, random: np.random.Generator) -> Array:
        """Return the features of what the parameter may be: of all values, or of some of its range."""
        if self._range is None or self._columns is not None:
            return np.eye(self.columns.stop - self.columns.start)
        return self.features(candidates(self._range, random))


class Space:
    """The parameters that trials had, and which of them occur together.

    Args:
        outcomes: the trials.
    """

    def __init__(self, outcomes: Iterable[Outcome]) -> None:
        kinds: dict[str, dict[Any, BaseDistribution]] = {}
        for outcome in outcomes:
            for name, distribution in outcome.distributions.items():
                kinds.setdefault(name, {}).setdefault(_kind(distribution), distribution)
        self.parameters: dict[str, Parameter] = {}
        self.num_features = 0
        for name, distributions in kinds.items():
            self.parameters[name] = Parameter(list(distributions.values()), self.num_features)
            self.num_features = self.parameters[name].columns.stop
        widths = [each.columns.stop - each.columns.start for each in self.parameters.values()]
        self.groups = np.repeat(np.arange(len(widths)), widths)

    def features(self, points: Sequence[Mapping[str, Any]]) -> Array:
        """Return the features of points, zero for parameters that one has not: of shape (num_points, num_features)."""
        found = np.zeros((len(points), self.num_features))
        for name, parameter in self.parameters.items():
            rows = [row for row, point in enumerate(points) if name in point]
            if rows:
                found[rows, parameter.columns] = parameter.features([points[row][name] for row in rows])
        return found


def candidates(distribution: BaseDistribution, random: np.random.Generator) -> list[Any]:
    """Return values to choose from: all, or some of a long range, one in each of its equal parts."""
    values = countable(distribution, _NUM_CANDIDATES)
    if values is not None:
        return values
    return [at(distribution, (part + random.random()) / _NUM_CANDIDATES) for part in range(_NUM_CANDIDATES)]


def _key(value: Any) -> Any:
    # True and 1 are equal, and fractions may differ in their last bit.
    return (type(value), round(value, 9) if isinstance(value, float) else value)


def _kind(distribution: Any) -> Any:
    # Choices have no range; Optuna refuses others under the same name.
    return getattr(distribution, "low", None), getattr(distribution, "high", None), getattr(distribution, "step", None)


def _union(distributions: Sequence[BaseDistribution]) -> FloatDistribution | None:
    numbers = [each for each in distributions if isinstance(each, FloatDistribution | IntDistribution)]
    if not numbers:
        return None
    room = 0.5 if isinstance(numbers[0], IntDistribution) else 0.0
    low, high = min(each.low for each in numbers), max(each.high for each in numbers)
    return FloatDistribution(low - room, high + room, log=numbers[0].log)
