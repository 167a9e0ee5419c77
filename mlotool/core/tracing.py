"""What a trace of a gradient takes down: decisions on values, and functions of torch that look at values.

A solver that ends at negative curvature decides by a number. A trace records the operations of the course that was
taken, and beside them the conditions that led to it, as outputs: a replay in which one of them differs is not used.
A trace for many runs, each of which decides for itself, computes all that a decision could ask for instead, and chooses
(`is_joint`).
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from mlotool.core.private import FakeTensor, FakeTensorMode


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


class ExamplesMode(FakeTensorMode):
    """Makes the examples of results that a trace notes; those of its base class take a fifth of the time of tracing.

    An example has a result's shape and device. It is always made as an empty tensor, for which there is nothing to
    look up.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.empty_strided.default:
            return super().__torch_dispatch__(func, types, args, kwargs)
        return FakeTensor(self, func(*args, **{**kwargs, "device": "meta"}), kwargs["device"])


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


_HOME = str(Path(__file__).parents[1])


class ValuesLeaveError(Exception):
    """A function that is traced hands the values of a tensor to code that a trace does not see.

    Args:
        name: of the method of the tensor that does.
    """

    def __init__(self, name: str) -> None:
        super().__init__(f"a loss or a module takes values out of torch (Tensor.{name}), which a trace does not see")


class TraceableFunctions(TorchFunctionMode):
    """A context in which some functions of torch are others of equal values.

    - `one_hot` does not check its targets.
    - `cross_entropy` takes a `label_smoothing` that is a tensor, as a number that differs by run is.
    - What hands values to other code than torch's (`numpy`, `tolist`, `str`) raises a ValuesLeaveError: a trace would
      fix what that code makes of them.

    Example:
        >>> with TraceableFunctions():
        ...     found = functional.one_hot(torch.tensor([1, 0]), 3)
        >>> found.tolist()
        [[0, 1, 0], [1, 0, 0]]
    """

    def __torch_function__(
        self, function: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the function, or what stands for it."""
        keywords = kwargs or {}
        # mlotool's own solvers note what they decide by values (`core/tracing.py`).
        if function in _EXITS and not sys._getframe(1).f_code.co_filename.startswith(_HOME):
            raise ValuesLeaveError(function.__name__)
        other = _OTHERS.get(function)
        result = NotImplemented if other is None else other(*args, **keywords)
        return function(*args, **keywords) if result is NotImplemented else result


def _one_hot(target: Tensor, num_classes: int = -1) -> Tensor:
    if num_classes < 0:
        return NotImplemented
    return (target.unsqueeze(-1) == torch.arange(num_classes, device=target.device)).long()


def _smoothed(logits: Tensor, target: Tensor, *more: Any, label_smoothing: Any = 0.0, **settings: Any) -> Tensor:
    """Return `(1 - s) cross-entropy + s / K sum over classes of -log p`, for a smoothing s that is a tensor."""
    ignore_index, reduction = settings.pop("ignore_index", -100), settings.pop("reduction", "mean")
    is_usual = all(value is None for value in (*more, *settings.values())) and not target.is_floating_point()
    if not isinstance(label_smoothing, Tensor) or not is_usual or logits.dim() < 2:
        return NotImplemented
    is_there = target != ignore_index
    spread = torch.where(is_there, -logits.log_softmax(1).mean(1), 0.0)
    if reduction == "mean":
        spread = spread.sum() / is_there.sum()
    elif reduction == "sum":
        spread = spread.sum()
    plain = functional.cross_entropy(logits, target, ignore_index=ignore_index, reduction=reduction)
    return plain + label_smoothing * (spread - plain)


_OTHERS: Mapping[Any, Callable[..., Tensor]] = {functional.one_hot: _one_hot, functional.cross_entropy: _smoothed}

_NAMES = "numpy tolist data_ptr storage untyped_storage"
_SPECIAL = "array dlpack repr format deepcopy reduce_ex"
_EXITS = {getattr(Tensor, name) for name in (*_NAMES.split(), *(f"__{name}__" for name in _SPECIAL.split()))}
