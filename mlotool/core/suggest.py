"""Did-you-mean for names that a user typed."""

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, options: Iterable[str]) -> str:
    """Return `` Did you mean 'mwn'?`` for the closest of `options`, or an empty string where none is close."""
    matches = get_close_matches(str(name), [str(option) for option in options], n=1, cutoff=0.6)
    return f" Did you mean '{matches[0]}'?" if matches else ""
