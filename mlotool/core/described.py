"""What a batch holds, in words: for messages about code that could not deal with it."""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

MAX_ITEMS = 8


def described(value: Any) -> str:
    """Return the keys, dtypes and shapes of a batch or of a part of it.

    Example:
        >>> import torch
        >>> described({"input": torch.zeros(4, 2), "target": torch.tensor([0, 2, 1, 0])})
        '{input: float32 (4, 2), target: int64 (4,) from 0 to 2}'
    """
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype} {_shape(value.shape)}{_values(value)}"
    if isinstance(value, Mapping):
        items = [f"{key}: {described(each)}" for key, each in list(value.items())[:MAX_ITEMS]]
        return f"{{{', '.join(items + _more(value))}}}"
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        items = [described(each) for each in islice(value, MAX_ITEMS)]
        return f"a {type(value).__name__} of {len(value)}: [{', '.join(items + _more(value))}]"
    if value is None or isinstance(value, bool | int | float | str):
        text = repr(value)
        return text if len(text) <= 40 else f"{text[:40]}..."
    return _with_article(type(value).__name__)


def kind_of(value: Any) -> str:
    """Return what a function has returned, as the object of a sentence: `a tensor of shape (8,)`, `a dict`, `None`."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        name = "a tensor" if type(value).__module__.startswith("torch") else f"a {type(value).__name__}"
        return f"{name} of shape {_shape(value.shape)}"
    if isinstance(value, Mapping):
        keys = ", ".join(str(key) for key in list(value)[:MAX_ITEMS])
        return f"a {type(value).__name__} with {f'the keys {keys}' if keys else 'no keys'}"
    return "None" if value is None else _with_article(type(value).__name__)


def _with_article(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def _shape(shape: Any) -> str:
    return str(tuple(shape))


def _more(value: Any) -> list[str]:
    return ["..."] if len(value) > MAX_ITEMS else []


def _values(value: Any) -> str:
    """Say the range of whole numbers, and whether numbers are not finite; nothing on a device, which may be broken."""
    if getattr(getattr(value, "device", None), "type", None) != "cpu" or not value.numel():
        return ""
    try:
        if value.is_floating_point():
            return "" if bool(value.isfinite().all()) else ", not all finite"
        return f" from {int(value.min())} to {int(value.max())}"
    except (RuntimeError, NotImplementedError, ValueError):
        return ""
