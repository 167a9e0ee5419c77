"""Arguments of the Python interface that are of another kind than they should be: one message for each. No torch.

The checks stand where objects are made and functions are entered, never where a loss is evaluated.
"""

import inspect
import os
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

from mlotool.core.errors import ConfigError
from mlotool.core.messages import shown


def require(is_right: bool, key: str, value: Any, expected: str, advice: str = "") -> None:
    """Refuse an argument.

    Args:
        is_right: whether it is as it should be.
        key: what the argument is called.
        value: what was given.
        expected: after "expected".
        advice: what to do, whole sentences; "" says to correct it.

    Raises:
        ConfigError: it is not.
    """
    if not is_right:
        raise ConfigError(f"{key}: found {shown(value)}; expected {expected}. {advice or f'Correct {key}.'}")


def is_whole(value: Any, least: int | None = None) -> bool:
    """Say whether a value is a whole number, of at least `least`; True and False are none."""
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    return whole and (least is None or value >= least)


def is_number(value: Any) -> bool:
    """Say whether a value is a number; True and False are none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_path(value: Any) -> bool:
    """Say whether a value may be a path."""
    return isinstance(value, str) or (isinstance(value, os.PathLike) and isinstance(os.fspath(value), str))


def require_path(key: str, value: Any, expected: str = "a path", example: str = "outputs/...") -> None:
    """Refuse what is no path, such as the result of a run.

    Args:
        key: what the argument is called.
        value: what was given.
        expected: after "expected"; None is right where it ends with "null".
        example: of a value.

    Raises:
        ConfigError: it is none.
    """
    name = key.rpartition(".")[2]
    is_right = (value is None and expected.endswith("null")) or (is_path(value) and os.fspath(value) != "")
    advice = f"Write {name}='{example}'."
    if isinstance(getattr(value, "output_dir", None), os.PathLike):
        advice = "Give its folder: result.output_dir."
    require(is_right, key, value, expected, advice)


def require_texts(key: str, value: Any, example: str) -> None:
    """Refuse what is no list of texts; a single text is a list of its letters.

    Args:
        key: what the argument is called.
        value: what was given.
        example: one of such texts.

    Raises:
        ConfigError: it is none.
    """
    is_right = isinstance(value, list | tuple) and all(isinstance(text, str) for text in value)
    name, written = key.rpartition(".")[2], value if isinstance(value, str) else example
    require(is_right, key, value, "a list of texts", f"Write {name}=['{written}'].")


def takes_nothing(function: Callable[..., Any]) -> bool:
    """Say whether a function can be called without arguments.

    Example:
        >>> takes_nothing(lambda: 0), takes_nothing(lambda x: x)
        (True, False)
    """
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):
        return False
    return True
