"""What a checkpoint can hold: anything else in a state is told by its place, before it is written."""

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from mlotool.core.arguments import shown
from mlotool.core.errors import RunError

_PLAIN = (type(None), bool, int, float, str, bytes, torch.Size, torch.device, torch.dtype)
_CONTAINERS = (dict, OrderedDict, Counter, list, tuple)
_PARTS = ("module", "optimizer", "scheduler")


def check_plain(program: Mapping[str, Any]) -> None:
    """Refuse a state of a problem that a checkpoint cannot hold, since reading one must not call anything.

    Args:
        program: what the program's `state_dict` has returned.

    Raises:
        RunError: the user's module, optimizer or scheduler keeps something else than tensors, numbers and texts.
    """
    for name, state in program.items():
        for part in _PARTS:
            for path, value in _strange(state[part], ""):
                kind = f"{type(value).__module__}.{type(value).__qualname__}"
                raise RunError(
                    f"problems.{name}.{part}: its state_dict() holds {shown(value)}, of class {kind}, at '{path}'; "
                    "expected tensors, numbers, texts, and dicts and lists of them, which alone a checkpoint can hold. "
                    "Make it a number, as in float(x), or leave it out of what state_dict() returns."
                )


def _strange(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the places of what is neither plain nor a container of plain values."""
    # Not isinstance: numpy's float64 is a float, and is saved as a call of numpy.
    if isinstance(value, Tensor) or type(value) in _PLAIN:
        return
    if type(value) not in _CONTAINERS:
        yield path or "all of it", value
        return
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    for key, each in items:
        yield from _strange(each, f"{path}.{key}".lstrip("."))
