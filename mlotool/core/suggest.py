"""Did-you-mean for names that a user typed."""

from collections.abc import Iterable
from difflib import get_close_matches

_MAX_LENGTH, _MAX_OPTIONS = 100, 300


def did_you_mean(name: str, options: Iterable[str]) -> str:
    """Return `` Did you mean 'mwn'?`` for the closest of `options`, or an empty string where none is close."""
    # difflib is quadratic in the length of a name.
    options = [option for option in map(str, options) if len(option) <= _MAX_LENGTH][:_MAX_OPTIONS]
    if len(str(name)) > _MAX_LENGTH:
        return ""
    plain = {option.casefold(): option for option in reversed(options)}
    matches = get_close_matches(str(name), options, n=1, cutoff=0.6) or [
        plain[each] for each in get_close_matches(str(name).casefold(), plain, n=1, cutoff=0.6)
    ]
    return f" Did you mean '{matches[0]}'?" if matches and matches[0] != name else ""
