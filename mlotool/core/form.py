"""Whether a saved value has the form of what stands in its place now."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mlotool.core.arguments import is_number, is_whole, require, shown

MAX_COUNT = 10**15
ADVICE = "Give what state_dict() has returned."


def check_form(key: str, found: Any, own: Any) -> None:
    """Refuse a saved value of another form: another kind, number of values, shape or keys, or a number that is none.

    Args:
        key: its place, for the message.
        found: the saved value.
        own: what stands there now; for None it may be anything.

    Raises:
        ConfigError: it is of another form.

    Example:
        >>> check_form("state", {"last_epoch": 3, "lr": [0.5]}, {"last_epoch": 0, "lr": [1]})
        >>> check_form("state", {"last_epoch": "x"}, {"last_epoch": 0})
        Traceback (most recent call last):
        mlotool.core.errors.ConfigError: state.last_epoch: found 'x'; expected a number. Give what state_dict() has ...
    """
    if isinstance(own, Tensor):
        check_tensor(key, found, own)
    elif isinstance(own, bool | str):
        require(type(found) is type(own), key, found, "true or false" if isinstance(own, bool) else "a text", ADVICE)
    elif is_number(own):
        is_right = is_number(found) and (not math.isfinite(own) or abs(found) < math.inf)
        is_right = is_right and not (is_whole(own) and is_whole(found) and abs(found) >= MAX_COUNT)
        require(is_right, key, found, "a number", ADVICE)
    elif isinstance(own, Mapping):
        require(isinstance(found, Mapping), key, found, "a dict", ADVICE)
        for name, value in own.items():
            require(name in found, key, found, f"'{name}' among its keys", ADVICE)
            check_form(f"{key}.{name}", found[name], value)
    elif isinstance(own, Sequence):
        check_list(key, found, len(own))
        for number, value in enumerate(own):
            check_form(f"{key}.{number}", found[number], value)


def check_tensor(key: str, found: Any, own: Tensor) -> None:
    """Refuse what is no tensor of the same shape and kind of numbers. Arguments as for `check_form`."""
    require(is_like(found, own), key, found, shown(own), ADVICE)


def is_like(found: Any, own: Tensor) -> bool:
    """Say whether something is a tensor of the same shape and kind of numbers; precisions are converted."""
    return isinstance(found, Tensor) and found.shape == own.shape and _kind(found) == _kind(own)


def check_tensors(key: str, found: Any, own: Sequence[Tensor]) -> None:
    """Refuse what is no list of tensors like these. Arguments as for `check_form`."""
    check_list(key, found, len(own))
    for number, value in enumerate(own):
        check_tensor(f"{key}.{number}", found[number], value)


def check_list(key: str, found: Any, length: int | None = None) -> None:
    """Refuse what is no list, or one of another length."""
    is_right = isinstance(found, list | tuple) and length in (None, len(found))
    require(is_right, key, found, "a list" if length is None else f"a list of {length} values", ADVICE)


def check_mapping(key: str, found: Any, names: Sequence[str] = ()) -> None:
    """Refuse what is no dict with these keys."""
    require(isinstance(found, Mapping), key, found, "a dict", ADVICE)
    for name in names:
        require(name in found, key, found, f"'{name}' among its keys", ADVICE)


def check_count(key: str, found: Any) -> None:
    """Refuse what is no count."""
    require(is_whole(found, 0) and found < MAX_COUNT, key, found, "a whole number from 0 on", ADVICE)


def check_random(key: str, found: Any) -> None:
    """Refuse what is no state of torch's generator on a CPU."""
    try:
        torch.Generator().set_state(found.cpu())
    except (AttributeError, RuntimeError, TypeError):
        require(False, key, found, "the state of torch's generator", ADVICE)


def check_random_state(key: str, state: Any) -> None:
    """Refuse what is no state of a program's generators."""
    check_mapping(key, state, ("cpu", "cuda"))
    check_random(f"{key}.cpu", state["cpu"])
    check_list(f"{key}.cuda", state["cuda"])


def _kind(tensor: Tensor) -> tuple[bool, bool]:
    return tensor.is_floating_point(), tensor.is_complex()
