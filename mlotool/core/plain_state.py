"""What a checkpoint can hold, and whether a saved value has the form of what stands in its place now.

Reading a checkpoint must not call anything, so it holds plain values alone.
"""

import math
import re
from collections import Counter, OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from mlotool.core.arguments import is_number, is_whole, require
from mlotool.core.errors import MlotoolError, RunError
from mlotool.core.messages import shown

MAX_DEPTH = 50

_KEYS = (type(None), bool, int, float, str)
_PLAIN = (*_KEYS, torch.device, torch.dtype)
_CONTAINERS = (dict, OrderedDict, Counter, list, tuple, torch.Size)
_EXPECTED = "tensors, numbers, texts, and dicts and lists of them, since a checkpoint can hold nothing else"


class Fault(NamedTuple):
    """Something that a checkpoint cannot hold: its place, and in words what was found there and what to do."""

    path: str
    found: str
    advice: str


def find_fault(value: Any, *, before_run: bool = False, path: tuple[Hashable, ...] = ()) -> Fault | None:
    """Return the first value of a tree that a checkpoint cannot hold; None where there is none.

    Args:
        value: the tree.
        before_run: take tensors that have no values yet, on the device `meta` or of a lazy module.
        path: of the tree.

    Example:
        >>> find_fault({"a": [1, {2.5}]}).path
        'a.1'
    """
    # Not isinstance: numpy's float64 is a float, and is saved as a call of numpy.
    kind = type(value)
    if isinstance(value, Tensor):
        held = "" if before_run and (is_lazy(value) or value.is_meta) else _unsaveable(value)
        return Fault(_joined(path), held, "Save a plain tensor, such as x.to_dense().detach().") if held else None
    if kind in _PLAIN:
        return None
    if kind not in _CONTAINERS:
        held = f"{shown(value)}, of class {kind.__module__}.{kind.__qualname__}"
        return Fault(_joined(path), held, "Make it a list, a tensor or a number as in float(x), or leave it out.")
    if len(path) > MAX_DEPTH:
        return Fault(_joined(path), f"more than {MAX_DEPTH} levels of dicts and lists", "Make it flat.")
    for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
        if type(key) not in _KEYS:
            return Fault(_joined(path), f"the key {shown(key)} in a dict", "Make the key a text, as in str(key).")
        if fault := find_fault(part, before_run=before_run, path=(*path, key)):
            return fault
    return None


def check_plain(program: Mapping[str, Any], raises: type[MlotoolError] = RunError, *, before_run: bool = False) -> None:
    """Refuse a state of a program that a checkpoint cannot hold.

    Args:
        program: by problem, the parts of its state.
        raises: the class of the error.
        before_run: as for `find_fault`.

    Raises:
        MlotoolError: a module, an optimizer, a scheduler or an algorithm keeps something else than plain values.
    """
    for name, state in program.items():
        for part, value in state.items():
            if fault := find_fault(value, before_run=before_run):
                held = f"its state_dict() holds {fault.found}, at '{fault.path}'"
                raise raises(f"problems.{name}.{part}: {held}; expected {_EXPECTED}. {fault.advice}")


def is_dense(tensor: Tensor) -> bool:
    """Say whether each element has a place of its own in memory, and there are no others; so are all of a checkpoint.

    Example:
        >>> is_dense(torch.ones(2, 3).t()), is_dense(torch.ones(2, 1).expand(2, 3)), is_dense(torch.ones(9)[::2])
        (True, False, False)
    """
    return tensor.stride() == torch.empty_like(tensor, device="meta").stride()


def _unsaveable(tensor: Tensor) -> str:
    """Return in words what a tensor is that no checkpoint holds; empty for others."""
    is_odd = tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta
    # Of those of a few bits torch writes none, and those with attributes as a call.
    is_odd = is_odd or bool(vars(tensor)) or re.fullmatch(r"torch\.u?int[1-7]", str(tensor.dtype)) is not None
    if type(tensor) in (Tensor, nn.Parameter) and not is_odd:
        return ""
    kind, attributes = type(tensor), f", with attributes {', '.join(vars(tensor))}" if vars(tensor) else ""
    where = f"{tensor.layout}, {tensor.dtype}, on {tensor.device}"
    return f"a tensor of class {kind.__module__}.{kind.__qualname__}, {where}{attributes}"


def _joined(path: tuple[Hashable, ...]) -> str:
    return ".".join(str(value)[:100] for value in path[:MAX_DEPTH]) or "all of it"


MAX_COUNT = 10**15
ADVICE = "Give what state_dict() has returned."


def check_form(key: str, saved: Any, own: Any) -> None:
    """Refuse a saved value of another form: another kind, number of values, shape or keys, or a number that is none.

    Args:
        key: its place, for the message.
        saved: the value that was saved.
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
        require(is_like(saved, own), key, saved, shown(own), ADVICE)
    elif isinstance(own, bool | str):
        require(type(saved) is type(own), key, saved, "true or false" if isinstance(own, bool) else "a text", ADVICE)
    elif is_number(own):
        is_right = is_number(saved) and (not math.isfinite(own) or abs(saved) < math.inf)
        is_right = is_right and not (is_whole(own) and is_whole(saved) and abs(saved) >= MAX_COUNT)
        require(is_right, key, saved, "a number", ADVICE)
    elif isinstance(own, Mapping):
        check_mapping(key, saved, list(own))
        for name, value in own.items():
            check_form(f"{key}.{name}", saved[name], value)
    elif isinstance(own, Sequence):
        check_list(key, saved, len(own))
        for number, value in enumerate(own):
            check_form(f"{key}.{number}", saved[number], value)


def is_like(saved: Any, own: Tensor) -> bool:
    """Say whether something is a tensor of the same shape and kind of numbers; precisions are converted."""
    kinds = [(x.is_floating_point(), x.is_complex()) for x in (saved, own) if isinstance(x, Tensor)]
    return isinstance(saved, Tensor) and saved.shape == own.shape and kinds[0] == kinds[1]


def check_list(key: str, saved: Any, length: int | None = None) -> None:
    """Refuse what is no list, or one of another length."""
    is_right = isinstance(saved, list | tuple) and length in (None, len(saved))
    require(is_right, key, saved, "a list" if length is None else f"a list of {length} values", ADVICE)


def check_mapping(key: str, saved: Any, names: Sequence[str] = ()) -> None:
    """Refuse what is no dict with these keys."""
    require(isinstance(saved, Mapping), key, saved, "a dict", ADVICE)
    for name in names:
        require(name in saved, key, saved, f"'{name}' among its keys", ADVICE)


def check_count(key: str, saved: Any) -> None:
    """Refuse what is no count."""
    require(is_whole(saved, 0) and saved < MAX_COUNT, key, saved, "a whole number from 0 on", ADVICE)


def check_random_state(key: str, state: Any) -> None:
    """Refuse what is no state of a program's generators."""
    check_mapping(key, state, ("cpu", "cuda"))
    try:
        torch.Generator().set_state(state["cpu"].cpu())
    except (AttributeError, RuntimeError, TypeError):
        require(False, f"{key}.cpu", state["cpu"], "the state of torch's generator", ADVICE)
    check_list(f"{key}.cuda", state["cuda"])
