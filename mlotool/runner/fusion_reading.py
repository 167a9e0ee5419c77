"""Reads what a group of runs has left about itself; it may be a stranger's, or half of it."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from mlotool.core.errors import RunFileError
from mlotool.core.run_files import read_json
from mlotool.fusion.comparison import Verdict
from mlotool.fusion.fused_ticks import StackRecord
from mlotool.fusion.stacked_schedule import Layout

MOST_CHANGES = 100
"""Of one verdict, which is halved a few times at most where memory is short."""

MOST_TICKS = 2**53

T = TypeVar("T")


class _WrongError(Exception):
    """A file is not as it was written.

    Args:
        key: where.
        value: what stands there.
    """

    def __init__(self, key: str, value: object) -> None:
        text = repr(value)
        super().__init__(f"{key} = {text if len(text) <= 80 else text[:79] + '…'}")


def read_record(path: Path, jobs: Sequence[int]) -> tuple[list[list[int]], list[StackRecord]]:
    """Return which runs began together, and what was found out about stacks of them, by numbers of runs.

    A file that is not as it was written is as good as none, with a warning: nothing in it could make a gradient wrong,
    but runs that share a program in another way than before have other last bits.

    Args:
        path: of the file.
        jobs: by number of the run, that of its job.
    """
    try:
        content = read_json(path.parent, path.name) or {}
        return _waves(content.get("waves", []), jobs), [_stack(each, jobs) for each in _list(content, "stacks")]
    except (RunFileError, _WrongError, RecursionError) as error:
        warnings.warn(
            f"{path}: found {' '.join(str(error).split())}; expected what an earlier process of these jobs wrote. What "
            " runs as one program is found out anew, so that the last bits may be others than without a break.",
            stacklevel=2,
        )
        return [], []


def _waves(value: Any, jobs: Sequence[int]) -> list[list[int]]:
    """Return the runs that began together."""
    if not isinstance(value, list):
        raise _WrongError("waves", value)
    waves = [_numbers("waves", each, jobs) for each in value]
    every = [number for wave in waves for number in wave]
    if len(set(every)) < len(every):
        raise _WrongError("waves", value)
    return waves


def _stack(stack: Any, jobs: Sequence[int]) -> StackRecord:
    members = _numbers("stacks.jobs", _value(stack, "jobs"), jobs)
    verdicts = {name: _verdict(each) for name, each in _mapping(stack, "rounds").items()}
    apart = _mapping(stack, "apart")
    layouts = {}
    for each in _list(stack, "layouts"):
        layouts[tuple(_numbers("layouts.jobs", _value(each, "jobs"), jobs))] = _layout(each)
    reason, since_tick = _checked(apart, "reason", str), _tick(apart)
    return StackRecord(tuple(members), verdicts, reason, since_tick, layouts)


def _layout(value: Any) -> Layout:
    shares, courses = _mapping(value, "shares"), _mapping(value, "courses")
    return Layout(
        {name: _checked(shares, name, bool) for name in shares},
        _all(_list(value, "own_values"), str, "own_values"),
        {name: _all(_list(courses, name), bool, "courses") for name in courses},
    )


def _verdict(value: Any) -> Verdict:
    chain: list[Any] = []
    while value is not None:
        chain.append(value)
        value = _value(value, "before")
        if len(chain) > MOST_CHANGES:
            raise _WrongError("before", "too many of them")
    found: Verdict | None = None
    for each in reversed(chain):
        at_once = _value(each, "at_once")
        if at_once is not None and not (type(at_once) is int and 0 < at_once < MOST_TICKS):
            raise _WrongError("at_once", at_once)
        found = Verdict(
            _checked(each, "is_fused", bool),
            _seconds(each, "fused_s"),
            _seconds(each, "alone_s"),
            _checked(each, "reason", str),
            at_once,
            _tick(each),
            found,
        )
    if found is None:
        raise _WrongError("rounds", None)
    return found


def _numbers(key: str, value: Any, jobs: Sequence[int]) -> list[int]:
    """Return the numbers of the runs of jobs."""
    if not isinstance(value, list) or not value or not all(type(job) is int and job in jobs for job in value):
        raise _WrongError(key, value)
    if len(set(value)) < len(value):
        raise _WrongError(key, value)
    return [jobs.index(job) for job in value]


def _tick(holder: Any) -> int:
    tick = _checked(holder, "since_tick", int)
    if not 0 <= tick < MOST_TICKS:
        raise _WrongError("since_tick", tick)
    return tick


def _seconds(holder: Any, key: str) -> float | None:
    value = _value(holder, key)
    if value is not None and not (type(value) in (int, float) and math.isfinite(value) and value >= 0):
        raise _WrongError(key, value)
    return None if value is None else float(value)


def _checked(holder: Any, key: str, kind: Callable[..., T]) -> T:
    value = _value(holder, key)
    if type(value) is not kind:
        raise _WrongError(key, value)
    return value


def _all(values: list[Any], kind: type[T], key: str) -> tuple[T, ...]:
    for each in values:
        if type(each) is not kind:
            raise _WrongError(key, values)
    return tuple(values)


def _list(holder: Any, key: str) -> list[Any]:
    value = _value(holder, key)
    if not isinstance(value, list):
        raise _WrongError(key, value)
    return value


def _mapping(holder: Any, key: str) -> Mapping[str, Any]:
    value = _value(holder, key)
    if not isinstance(value, dict):
        raise _WrongError(key, value)
    return value


def _value(holder: Any, key: str) -> Any:
    if not isinstance(holder, Mapping):
        raise _WrongError(key, holder)
    return holder.get(key)
