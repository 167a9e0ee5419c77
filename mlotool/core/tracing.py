"""Decisions on values while a gradient is traced: the trace holds for one course of them, and says when it does not.

A solver that ends at negative curvature decides by a number. A trace records the operations of the course that was
taken, and beside them the conditions that led to it, as outputs: a replay in which one of them differs is not used.
A trace for many runs, each of which decides for itself, computes all that a decision could ask for instead, and chooses
(`is_joint`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing


class Course:
    """What was decided in one trace.

    Args:
        is_joint: what can be computed for either outcome is not decided.
        known: how an earlier trace decided, which this one repeats; None decides by the values.

    Attributes:
        outcomes: the decisions, in order.
        conditions: 0-D truths that hold in the course that was taken.
        reports: by whoever reports, tensors to hand on after each replay.
    """

    def __init__(self, *, is_joint: bool = False, known: Sequence[bool] | None = None) -> None:
        self.is_joint = is_joint
        self._known = iter(known or ())
        self.outcomes: list[bool] = []
        self.conditions: list[Tensor] = []
        self.reports: list[tuple[Any, Tensor]] = []

    def decide(self, outcome: bool) -> bool:
        """Take a decision down; return the one that an earlier trace took."""
        self.outcomes.append(next(self._known, outcome))
        return self.outcomes[-1]


_COURSE: ContextVar[Course | None] = ContextVar("mlotool_trace", default=None)


def is_tracing() -> bool:
    """Return whether a gradient is being traced."""
    return _COURSE.get() is not None


def is_joint() -> bool:
    """Return whether a gradient is being traced for many runs, each of which decides for itself."""
    course = _COURSE.get()
    return course is not None and course.is_joint


@contextmanager
def tracing(*, is_joint: bool = False, known: Sequence[bool] | None = None) -> Iterator[Course]:
    """Take decisions down while a gradient is traced.

    Args:
        is_joint: what can be computed for either outcome is not decided.
        known: how an earlier trace decided, which this one repeats; None decides by the values.
    """
    course = Course(is_joint=is_joint, known=known)
    token = _COURSE.set(course)
    try:
        yield course
    finally:
        _COURSE.reset(token)


def decided(condition: bool | Tensor) -> bool:
    """Return a condition, 0-D, as a bool; while tracing, the trace holds for this outcome alone."""
    course = _COURSE.get()
    if course is None or not isinstance(condition, Tensor):
        return bool(condition)
    with disable_proxy_modes_tracing():
        outcome = course.decide(bool(condition))
    course.conditions.append(condition if outcome else torch.logical_not(condition))
    return outcome


def assume(condition: Tensor) -> None:
    """Let the trace hold for runs of which a condition is true, whether it is of the one that is traced or not.

    Args:
        condition: 0-D.
    """
    course = _COURSE.get()
    assert course is not None
    course.conditions.append(condition)


def report(who: Any, value: Tensor) -> None:
    """Have `who.reported(value)` called after each replay of the trace at hand."""
    course = _COURSE.get()
    assert course is not None
    course.reports.append((who, value))
