"""When stages have parted so far that training goes nowhere."""

import warnings
from collections.abc import Mapping, Sequence

from mlotool.core.errors import RunError
from mlotool.layerparallel.auxiliary.step_schedule import StepSchedule
from mlotool.layerparallel.auxiliary.worker import Worker

DIVERGED = 1e3
"""Violation, relative to the states or absolute, at which a run ends."""
PARTED = 10.0
"""The same, relative, at which it warns."""


class Divergence:
    """Watches the violations `norm(lambda_k - X^{k-1})` of a run; warns once.

    Args:
        key: of the setting, for messages.
        betas: the penalty coefficients, by interface.

    Example:
        >>> Divergence("problems.net.parallel", [StepSchedule.of(10.0, "beta")]).check({}, num_steps=3)
    """

    def __init__(self, key: str, betas: Sequence[StepSchedule]) -> None:
        self.key = key
        self._betas = betas
        self._has_warned = False

    def check(self, workers: Mapping[int, Worker], num_steps: int) -> None:
        """Look at the last violations.

        Args:
            workers: by stage; each has the violation at the interface before it and the norm of the states, (2,).
            num_steps: taken so far, for the message.

        Raises:
            RunError: one is far above the states.
        """
        for number, worker in workers.items():
            if worker.violations is None:
                continue
            violation, size = worker.violations.tolist()
            if not violation <= max(DIVERGED * size, DIVERGED):
                beta = self._betas[number - 1].at(num_steps - 1)
                raise RunError(
                    f"{self.key}: the violation at interface {number} became {violation:.3g} at step "
                    f"{num_steps} with beta={beta:g}, beside states of norm {size:.3g}; expected a small part of "
                    f"that. The stages diverge: lower {self.key}.beta (or the factor of its schedule), "
                    f"{self.key}.lambda_rate, or the learning rates of the stages and of their networks."
                )
            if violation > PARTED * size and not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"{self.key}: at interface {number} the violation is {violation / max(size, 1e-12):.3g} times the "
                    f"states (step {num_steps}), so the stages train on states that the serial network does not "
                    f"have. Raise {self.key}.beta where it is small, or lower {self.key}.lambda_rate.",
                    stacklevel=2,
                )
