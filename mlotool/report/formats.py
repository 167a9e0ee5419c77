"""Numbers and times as a reader wants them."""

import math
import re

NONE = "\N{EN DASH}"
# What is beyond is as good as infinite (its square or sum is), or as good as zero, with no place on a log scale.
LARGEST, SMALLEST = 1e150, 1e-150


def number(value: object) -> str:
    """Return a metric with four significant digits, and integers whole.

    Example:
        >>> number(0.93413), number(1000), number(1.2e-7)
        ('0.9341', '1000', '1.2e-07')
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return NONE if value is None else str(value)
    if not math.isfinite(value):
        return str(float(value))
    if float(value).is_integer() and abs(value) < 1e9:
        return str(int(value))
    return f"{value:.4g}"


def duration(seconds: object) -> str:
    """Return seconds as `3 h 12 min`, `4 min 05 s` or `12.3 s`."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not math.isfinite(seconds) or seconds < 0:
        return NONE
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def words(name: str) -> str:
    """Return a class or option name as lower-case words.

    Example:
        >>> words("ConjugateGradient"), words("finite_difference")
        ('conjugate gradient', 'finite difference')
    """
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name).replace("_", " ").lower()


def last_part(target: object) -> str:
    """Return `MLP` of `mlotool.models.MLP`."""
    return str(target).rsplit(".", 1)[-1]


def shortened(text: str, limit: int) -> str:
    """Return the text, cut with an ellipsis where it is longer than `limit` characters."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def shortened_key(key: str, limit: int) -> str:
    """Return a dotted key, cut at its beginning where it is longer than `limit` characters: its end tells more."""
    return key if len(key) <= limit else "…" + key[len(key) - limit + 1 :]
