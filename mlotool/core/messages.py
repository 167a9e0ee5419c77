"""Texts of messages: how a value is quoted, which name was meant, how long they are, and who reads them. No torch."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import islice
from typing import Any

MAX_FAULTS = 20
_MAX_LINE, _TAIL, _MAX_LINES = 1_000, 200, 60
_MAX_TEXT, _MAX_ITEMS = 100, 8
_MAX_NAME, _MAX_NAMES = 100, 300


def shown(value: Any) -> str:
    """Return in a few words what was found, for a message to quote.

    Example:
        >>> shown("cg"), shown(dict), shown({"a": 1}), shown(len), shown([1]), len(shown("x" * 10_000))
        ("'cg'", 'the class dict', '{a: 1}', 'the function len', '[1]', 103)
    """
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if _is_array(value):
        return kind_of(value)
    if isinstance(value, os.PathLike | bytes):
        return _cut(repr(str(value) if isinstance(value, os.PathLike) else value))
    if isinstance(value, Mapping):
        return f"{{{_listed((f'{key}: {shown(item)}' for key, item in value.items()), len(value))}}}"
    if isinstance(value, list | tuple):
        items = _listed(map(shown, value), len(value))
        return f"({items})" if isinstance(value, tuple) else f"[{items}]"
    if callable(value) and hasattr(value, "__name__"):
        return f"the function {value.__name__}"
    if value is None or isinstance(value, bool | int | float | str):
        return _cut(repr(value))
    return _with_article(type(value).__name__)


def described(value: Any) -> str:
    """Return the keys, dtypes and shapes of a batch or of a part of it.

    Example:
        >>> import torch
        >>> described({"input": torch.zeros(4, 2), "target": torch.tensor([0, 2, 1, 0])})
        '{input: float32 (4, 2), target: int64 (4,) from 0 to 2}'
    """
    if _is_array(value):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}{_range(value)}"
    if isinstance(value, Mapping):
        return f"{{{_listed((f'{key}: {described(item)}' for key, item in value.items()), len(value))}}}"
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return f"a {type(value).__name__} of {len(value)}: [{_listed(map(described, value), len(value))}]"
    return shown(value)


def kind_of(value: Any) -> str:
    """Return what a function has returned, as the object of a sentence: `a tensor of shape (8,)`, `a dict`, `None`."""
    if _is_array(value):
        name = "a tensor" if type(value).__module__.startswith("torch") else f"a {type(value).__name__}"
        return f"{name} of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        keys = ", ".join(map(str, islice(value, _MAX_ITEMS)))
        return f"a {type(value).__name__} with {f'the keys {keys}' if keys else 'no keys'}"
    return "None" if value is None else _with_article(type(value).__name__)


def did_you_mean(name: str, options: Iterable[str]) -> str:
    """Return `` Did you mean 'mwn'?`` for the closest of `options`, or an empty string where none is close."""
    # difflib is quadratic in the length of a name.
    options = [option for option in map(str, options) if len(option) <= _MAX_NAME][:_MAX_NAMES]
    known = {option.casefold(): option for option in reversed(options)}
    matches = get_close_matches(str(name)[:_MAX_NAME].casefold(), known, n=1, cutoff=0.6)
    return f" Did you mean '{known[matches[0]]}'?" if matches and known[matches[0]] != name else ""


def fault_list(faults: Sequence[str], most: int = MAX_FAULTS) -> str:
    """Return the first faults, one a line, and how many more there are: a small file can have very many.

    Example:
        >>> fault_list([f"fault {index}" for index in range(22)]).splitlines()[-1]
        '... and 2 more'
    """
    more = [f"... and {len(faults) - most} more"] if len(faults) > most else []
    # The beginning of a line says what was found, its end what to do.
    ends = ((line[: _MAX_LINE - _TAIL], line[-_TAIL:]) for line in faults[:most])
    lines = [line if len(line) <= _MAX_LINE else " [...] ".join(cut) for line, cut in zip(faults, ends, strict=False)]
    return "\n".join([*lines, *more])


def bounded(message: str) -> str:
    """Return a message of any origin, with its long lines and its number of lines cut down."""
    return fault_list(message.split("\n"), _MAX_LINES)


def escape(text: str) -> str:
    r"""Return a text with what does not print as escapes: a terminal obeys control characters.

    Example:
        >>> print(escape("\x1b[2Jdone"))
        \x1b[2Jdone
    """
    return "".join(value if value.isprintable() or value in "\n\t" else ascii(value)[1:-1] for value in text)


_is_command_line = False


@contextmanager
def command_line() -> Iterator[None]:
    """Let messages say what to write on the command line, not in Python."""
    global _is_command_line
    was, _is_command_line = _is_command_line, True
    try:
        yield
    finally:
        _is_command_line = was


def is_command_line() -> bool:
    """Say whether messages go to the user of a command line."""
    return _is_command_line


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."


def _listed(texts: Iterable[str], count: int) -> str:
    return ", ".join([*islice(texts, _MAX_ITEMS), *(["..."] if count > _MAX_ITEMS else [])])


def _with_article(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _range(value: Any) -> str:
    """Say the range of whole numbers, and whether numbers are not finite; nothing on a device, which may be broken."""
    if getattr(getattr(value, "device", None), "type", None) != "cpu" or not value.numel():
        return ""
    try:
        if value.is_floating_point():
            return "" if bool(value.isfinite().all()) else ", not all finite"
        return f" from {int(value.min())} to {int(value.max())}"
    except (RuntimeError, ValueError):
        return ""
