"""The values of a parameter: all of them where they can be counted, and where a number lies in its range."""

import math
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution


def countable(distribution: BaseDistribution, limit: int) -> list[Any] | None:
    """Return all values, or None where there are more than `limit`; choices are always returned.

    Example:
        >>> countable(IntDistribution(2, 8, step=2), limit=10), countable(FloatDistribution(0.0, 1.0), limit=10)
        ([2, 4, 6, 8], None)
    """
    if isinstance(distribution, CategoricalDistribution):
        return list(distribution.choices)
    low, high, step = _range(distribution)
    if step is None:
        return [low] if low == high else None
    count = math.floor((high - low) / step + 1e-8) + 1
    return [_on_grid(distribution, low + step * each) for each in range(count)] if count <= limit else None


def contains(distribution: BaseDistribution, value: Any) -> bool:
    """Say whether a value of another trial may be taken."""
    try:
        return bool(distribution._contains(distribution.to_internal_repr(value)))
    except ValueError:
        return False


def draw(distribution: BaseDistribution, random: np.random.Generator) -> Any:
    """Return a value, all of them being as likely; of a logarithmic range, all orders of magnitude."""
    if isinstance(distribution, CategoricalDistribution):
        return distribution.choices[int(random.integers(len(distribution.choices)))]
    return at(distribution, random.random())


def position(distribution: BaseDistribution, value: float) -> float:
    """Return where a number lies in its range: 0 at the lower end, 1 at the upper one, logarithmically if it is that.

    Example:
        >>> round(position(FloatDistribution(1e-3, 1e-1, log=True), 1e-2), 9)
        0.5
    """
    low, high = _ends(distribution)
    inner = math.log(value) if _is_log(distribution) else value
    return min(max((inner - low) / (high - low), 0.0), 1.0) if high > low else 0.5


def at(distribution: BaseDistribution, where: float) -> float | int:
    """Return the value at a position between 0 and 1.

    Example:
        >>> at(IntDistribution(1, 4), 0.6)
        3
    """
    low, high = _ends(distribution)
    inner = low + (high - low) * where
    return _on_grid(distribution, math.exp(inner) if _is_log(distribution) else inner)


def _range(distribution: BaseDistribution) -> tuple[float, float, float | None]:
    assert isinstance(distribution, FloatDistribution | IntDistribution)
    return distribution.low, distribution.high, distribution.step


def _is_log(distribution: BaseDistribution) -> bool:
    return bool(getattr(distribution, "log", False))


def _ends(distribution: BaseDistribution) -> tuple[float, float]:
    """Return the ends of the range; each value of a grid has a whole step, those at the ends too."""
    low, high, step = _range(distribution)
    low, high = (low, high) if step is None else (low - step / 2, high + step / 2)
    return (math.log(low), math.log(high)) if _is_log(distribution) else (low, high)


def _on_grid(distribution: BaseDistribution, value: float) -> float | int:
    low, high, step = _range(distribution)
    if step is not None:
        value = low + step * round((value - low) / step)
    value = min(max(value, low), high)
    return int(value) if isinstance(distribution, IntDistribution) else float(value)
