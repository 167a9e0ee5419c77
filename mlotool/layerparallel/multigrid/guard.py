"""Watches how far the multigrid gradient is from the serial one, and acts on it."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from mlotool.core.arguments import is_number, is_whole
from mlotool.core.errors import ConfigError
from mlotool.layerparallel.multigrid.settings import Method

Methods = tuple[Method, Method]
"""Of the forward and of the backward solve."""
Norm = Callable[[Tensor], Tensor]
"""The Euclidean norm () over all ranks that share the layers, from that of one's own entries."""


@dataclass(frozen=True)
class Solved:
    """What one forward and backward solve have found.

    Args:
        gradient: with respect to u0 and each parameter; None where it is not needed.
        state: the last one (b, ...).

    Example:
        >>> exact, found = (Solved([torch.tensor([1.0, y])], torch.ones(1, 3)) for y in (0.0, 0.02))
        >>> round(found.bias(exact), 4)
        0.02
    """

    gradient: Sequence[Tensor | None]
    state: Tensor

    def bias(self, exact: "Solved", norm: Norm = lambda own: own) -> float:
        """Return the larger of the relative errors of the gradient and of the last state.

        What the loss makes of an inexact last state is not in the gradient, so that state's error counts as well.

        Args:
            exact: what serial passes find.
            norm: over all ranks, of the gradient.
        """
        mine, theirs = self.vector(), exact.vector()
        pairs = ((mine, theirs), (self.state.double(), exact.state.double()))
        # All ranks have the last state; that its sizes are added up as well makes them find the same bits.
        sizes = [(norm(_size(one - other)), norm(_size(other))) for one, other in pairs]
        return max(float(distance / size) if size else float(distance) for distance, size in sizes)

    def is_comparable(self, norm: Norm) -> bool:
        """Say whether a relative error to this one means anything: it is finite, and the gradient is not zero.

        Args:
            norm: over all ranks, of the gradient.
        """
        sizes = [float(norm(_size(each.double()))) for each in (self.vector(), self.state)]
        return all(map(isfinite, sizes)) and sizes[0] > 0

    def vector(self) -> Tensor:
        """Return the gradient as one vector."""
        return torch.cat([each.flatten().double() for each in self.gradient if each is not None])


Measure = Callable[[Methods | None], Solved]
"""Solves the batch at hand with other methods; None is a serial pass."""


class AbstractGuard(ABC):
    """Compares every so many gradients with the serial one.

    Attributes:
        every: training steps from one comparison to the next; 0 never compares.
        left: until the next one.
        is_serial: whether layers run one after the other until something else is decided.
        bias: of the last comparison; None before the first.

    Example:
        >>> guard: AbstractGuard = Guard(every=1)
        >>> guard.begin(), guard.take_due()
        (False, True)
    """

    every: int
    left: int
    is_serial: bool
    bias: float | None = None
    _is_due = False

    @abstractmethod
    def methods(self, forward: Method, backward: Method) -> Methods | None:
        """Return how the layers are solved, in place of these settings; None is one after the other."""

    @abstractmethod
    def compare(self, found: Solved, measure: Measure, norm: Norm) -> Solved:
        """Measure the bias and act on it; return the serial gradient.

        Args:
            found: by the methods of this step.
            measure: solves the batch again, with other methods.
            norm: over all ranks that share the layers.
        """

    @abstractmethod
    def statistics(self) -> dict[str, float]:
        """Return the last comparison and what it led to."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the counters."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` has returned."""

    def begin(self) -> bool:
        """Count one more training step; return whether its forward is a plain pass through the layers."""
        self._is_due = False
        if self.every and (not self.is_serial or self._looks_again()):
            self.left -= 1
            self._is_due = self.left <= 0
        return self.is_serial and not self._is_due

    def _looks_again(self) -> bool:
        """Say whether steps are compared while the layers run serially."""
        return False

    def take_due(self) -> bool:
        """Return whether the gradient of this step is to be compared, to the first who asks."""
        is_due, self._is_due = self._is_due, False
        return is_due


@dataclass
class Guard(AbstractGuard):
    """Adds cycles where the multigrid gradient is too far from the serial one, and goes serial where that is no help.

    Near a minimum the gradient is a small difference of large parts, and inexact cycles give it a bias that no step
    size removes. The bias is `norm(g - g_serial) / norm(g_serial)` over u0 and all parameters of the layers, or the
    relative error of the last state where that is larger (`Solved.bias`). A gradient that was compared is handed on as
    the serial one. After a bad one the next is compared too, so that cycles are added quickly.

    Args:
        every: training steps from one comparison to the next; 0 never compares.
        threshold: largest relative bias.
        max_cycles: to add.

    Attributes:
        bias: of the last comparison; None before the first.
        cosine: of the angle between the two gradients then.
        extra_cycles: added so far.

    Raises:
        ConfigError: a setting is out of range.

    Example:
        >>> guard, exact = Guard(every=2, threshold=0.1), Solved([torch.tensor([1.0, 0.0])], torch.ones(1, 3))
        >>> guard.begin(), guard.take_due(), guard.begin(), guard.take_due()
        (False, False, False, True)
        >>> found = Solved([torch.tensor([1.0, 0.02])], torch.ones(1, 3))
        >>> _ = guard.compare(found, lambda methods: exact, lambda own: own)
        >>> round(guard.bias, 4), guard.extra_cycles
        (0.02, 0)
    """

    every: int = 0
    threshold: float = 0.1
    max_cycles: int = 8

    def __post_init__(self) -> None:
        check_guard(self.every, self.threshold, self.max_cycles)
        self.cosine: float | None = None
        self.extra_cycles, self.is_serial = 0, False
        self.left = self.every

    def methods(self, forward: Method, backward: Method) -> Methods:
        """Return the settings with the cycles that were added."""
        extra = self.extra_cycles
        return replace(forward, cycles=forward.cycles + extra), replace(backward, cycles=backward.cycles + extra)

    def compare(self, found: Solved, measure: Measure, norm: Norm) -> Solved:
        """Add a cycle, or go serial, where the bias is too large; return the serial gradient."""
        exact = measure(None)
        if not exact.is_comparable(norm):
            self.left = 1
            return exact
        self.bias = found.bias(exact, norm)
        self.cosine = _cosine(found.vector(), exact.vector(), norm)
        self.left = self.every
        # A NaN of multigrid is no small bias.
        if not self.bias <= self.threshold:
            self._act()
        return exact

    def statistics(self) -> dict[str, float]:
        """Return the last comparison and what it led to."""
        if not self.every:
            return {}
        found = {"extra_cycles": float(self.extra_cycles), "is_serial": float(self.is_serial)}
        if self.bias is not None and self.cosine is not None:
            found |= {"gradient_bias": self.bias, "gradient_cosine": self.cosine}
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the counters."""
        kept = {"extra_cycles": self.extra_cycles, "is_serial": self.is_serial, "left": self.left}
        return {"bias": self.bias, "cosine": self.cosine, **kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` has returned."""
        # What is missing is that of `cycles: auto`, which decides by itself.
        self.bias, self.cosine, self.left = state["bias"], state.get("cosine"), state["left"]
        self.extra_cycles, self.is_serial = state.get("extra_cycles", 0), state.get("is_serial", False)

    def _act(self) -> None:
        if self.extra_cycles >= self.max_cycles:
            self.is_serial = True
            what = (
                f"with all {self.extra_cycles} cycles that guard_max_cycles allows to add: the layers run serially "
                "from now on. Set more cycles, a smaller coarsening, or FCF relaxation."
            )
        else:
            self.extra_cycles += 1
            self.left = 1
            what = f"so from now on there are {self.extra_cycles} more cycles than set. Set more if this is the rule."
        warnings.warn(
            f"The multigrid gradient was {self.bias:.2g} (relative) from the serial one, more than "
            f"guard_threshold={self.threshold:g}, {what}",
            stacklevel=2,
        )


def check_guard(every: Any, threshold: Any, max_cycles: Any) -> None:
    """Refuse settings of a guard that are out of range.

    Args:
        every: guard_every.
        threshold: guard_threshold.
        max_cycles: guard_max_cycles.

    Raises:
        ConfigError: one of them is.

    Example:
        >>> check_guard(100, 0.1, 8)
    """
    if not (is_whole(every, 0) and is_number(threshold) and threshold > 0 and is_whole(max_cycles, 0)):
        raise ConfigError(
            f"guard: found guard_every={every!r}, guard_threshold={threshold!r}, guard_max_cycles={max_cycles!r}; "
            "expected whole numbers of at least 0, and a threshold above 0. Correct them."
        )


def _size(values: Tensor) -> Tensor:
    return torch.linalg.vector_norm(values)


def _cosine(mine: Tensor, exact: Tensor, norm: Norm) -> float:
    # By norms, which ranks can add up.
    distance, one, other = (float(norm(_size(each))) for each in (mine - exact, mine, exact))
    return (one**2 + other**2 - distance**2) / (2 * one * other) if one and other else 0.0
