"""Watches how far the multigrid gradient is from the serial one."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mlotool.core.errors import ConfigError

# Which of them warned is the user's to see once; every later one is in the statistics.
_ADDS = (
    "The multigrid gradient was {bias:.2g} (relative) from the serial one, more than guard_threshold={threshold:g}: "
    "from now on there are {extra} more cycles than set, forward and backward. Set more cycles if this is the rule."
)
_GIVES_UP = (
    "The multigrid gradient was {bias:.2g} (relative) from the serial one, more than guard_threshold={threshold:g}, "
    "with all {extra} cycles that guard_max_cycles allows to add: the layers run serially from now on. Set more "
    "cycles, a smaller coarsening, or FCF relaxation."
)


@dataclass
class Guard:
    """Compares every so many gradients with the serial one; adds cycles, and goes serial where that does not help.

    Near a minimum the gradient is a small difference of large parts, and inexact cycles give it a bias that no step
    size removes. The bias is `norm(g - g_serial) / norm(g_serial)` over u0 and all parameters of the layers, where
    g_serial is plain backpropagation's. What the loss makes of an inexact last state is not in it, so that state's
    relative error counts as well: the larger of the two is compared. A gradient that was compared is handed on as
    the serial one. After a bad one the next is compared too, so that cycles are added quickly.

    Args:
        every: gradients from one comparison to the next; 0 never compares.
        threshold: largest relative bias.
        max_cycles: to add.

    Attributes:
        bias: of the last comparison; None before the first.
        cosine: of the angle between the two gradients then.
        extra_cycles: added so far.
        is_serial: whether it has given up.

    Raises:
        ConfigError: a setting is out of range.

    Example:
        >>> guard, state = Guard(every=2, threshold=0.1), torch.ones(1, 3)
        >>> guard.is_due(), guard.is_due()
        (False, True)
        >>> guard.compare([torch.tensor([1.0, 0.02])], [torch.tensor([1.0, 0.0])], state, state)
        >>> round(guard.bias, 4), guard.extra_cycles
        (0.02, 0)
    """

    every: int = 0
    threshold: float = 0.1
    max_cycles: int = 8

    def __post_init__(self) -> None:
        if not (isinstance(self.every, int) and self.every >= 0 and self.threshold > 0 and self.max_cycles >= 0):
            raise ConfigError(
                f"guard: found guard_every={self.every!r}, guard_threshold={self.threshold!r}, "
                f"guard_max_cycles={self.max_cycles!r}; expected a whole guard_every >= 0 (0: no guard), a positive "
                "threshold and guard_max_cycles >= 0. Correct them."
            )
        self.bias: float | None = None
        self.cosine: float | None = None
        self.extra_cycles = 0
        self.is_serial = False
        self._left = self.every

    def is_due(self) -> bool:
        """Count one more gradient; return whether this one is to be compared."""
        if not self.every or self.is_serial:
            return False
        self._left -= 1
        return self._left < 0 or self._left == 0

    def compare(self, found: Sequence[Tensor], serial: Sequence[Tensor], state: Tensor, serial_state: Tensor) -> None:
        """Measure the bias, and act on it.

        Args:
            found: the multigrid gradient.
            serial: the serial one.
            state: the last state (b, ...) of multigrid.
            serial_state: of the serial pass.
        """
        mine, exact = (torch.cat([tensor.flatten().double() for tensor in tensors]) for tensors in (found, serial))
        of_state = _relative(state.double(), serial_state.double())
        self.bias = max(_relative(mine, exact), of_state)
        self.cosine = float(torch.nn.functional.cosine_similarity(mine, exact, dim=0))
        self._left = self.every
        # A NaN of multigrid is no small bias.
        if not self.bias <= self.threshold:
            self._act()

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
        return {
            "bias": self.bias,
            "cosine": self.cosine,
            "extra_cycles": self.extra_cycles,
            "is_serial": self.is_serial,
            "left": self._left,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` has returned."""
        self.bias, self.cosine = state["bias"], state["cosine"]
        self.extra_cycles, self.is_serial, self._left = state["extra_cycles"], state["is_serial"], state["left"]

    def _act(self) -> None:
        text = _ADDS
        if self.extra_cycles >= self.max_cycles:
            self.is_serial, text = True, _GIVES_UP
        else:
            self.extra_cycles += 1
            self._left = 1
        warnings.warn(
            text.format(bias=self.bias, threshold=self.threshold, extra=self.extra_cycles), UserWarning, stacklevel=2
        )


def _relative(found: Tensor, exact: Tensor) -> float:
    distance, size = float(torch.linalg.vector_norm(found - exact)), float(torch.linalg.vector_norm(exact))
    return distance / size if size else distance
