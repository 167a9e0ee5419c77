"""Whether learned weights weigh anything, for the warning at the end of a run and for its page."""

from typing import Any

SPREAD = 0.01


def are_equal(weight: Any) -> bool:
    """Say whether weights, an array (n,) of numpy, are all within 1% of each other, so that samples count the same.

    Example:
        >>> import numpy
        >>> are_equal(numpy.array([0.998, 1.0])), are_equal(numpy.array([0.98, 1.0]))
        (True, False)
    """
    return len(weight) > 1 and float(weight.max() - weight.min()) <= SPREAD * float(abs(weight).max())
