"""What binds neighbouring stages: penalties, multipliers and their steps, as pure functions of tensors."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mlotool.core.errors import ConfigError

# s: samples of a batch, ...: the shape of a state


@dataclass(frozen=True)
class Beta:
    """A penalty coefficient that grows: `min(start factor^(step // every), maximum)`.

    Args:
        start: at the first step.
        factor: by which it is multiplied.
        every: steps between two growths.
        maximum: where it stays.
    """

    start: float
    factor: float = 1.0
    every: int = 1
    maximum: float = float("inf")

    @staticmethod
    def of(value: "float | Mapping[str, float] | Beta", key: str) -> "Beta":
        """Return a schedule; a number stays what it is."""
        if isinstance(value, Beta):
            return value
        known = ("start", "factor", "every", "maximum")
        if isinstance(value, Mapping) and ("start" not in value or not set(value) <= set(known)):
            raise ConfigError(
                f"{key}: found {dict(value)}; expected a number, or {{start: .., factor: .., every: .., maximum: ..}}. "
                f"Correct {key}."
            )
        numbers = [*value.values()] if isinstance(value, Mapping) else [value]
        if not all(isinstance(each, int | float) and not isinstance(each, bool) for each in numbers):
            raise ConfigError(f"{key}: found {value!r}; expected numbers. Correct {key}.")
        found = Beta(**value) if isinstance(value, Mapping) else Beta(value)  # type: ignore[arg-type]
        if not (found.start > 0 and found.factor > 0 and found.every >= 1 and found.maximum > 0):
            raise ConfigError(
                f"{key}: found {value}; expected start, factor and maximum above 0, and every of at least 1. "
                f"Correct {key}."
            )
        return found

    def at(self, step: int) -> float:
        """Return the coefficient at a step, counted from 0."""
        return min(self.start * self.factor ** (step // self.every), self.maximum)


def local_loss(state: Tensor, variable: Tensor, multiplier: Tensor | None, beta: float, weight: float) -> Tensor:
    """Return what stage k < K - 1 is trained by: `c (beta norm(lambda - X)^2 + <kappa, X>)`.

    The derivative with respect to X of this is that of the augmented Lagrangian's term
    `c (beta norm(lambda - X)^2 - <kappa, lambda - X>)`.

    Args:
        state: X, (s, ...), where stage k ends.
        variable: lambda_{k+1}, (s, ...), where stage k + 1 begins; held fixed.
        multiplier: kappa_{k+1}, (s, ...); None is zero: the penalty method.
        beta: the penalty coefficient.
        weight: c, 1 for a sum over all elements, 1 / (number of elements) for a mean.

    Source: Sun et al. 2021, Layer-Parallel Training of Residual Networks with Auxiliary-Variable Networks, eq. 20, 22.
    """
    total = beta * (state - variable).square().sum()
    if multiplier is not None:
        total = total + (multiplier * state).sum()
    return weight * total


def variable_slope(
    variable: Tensor, state: Tensor, multiplier: Tensor | None, beta: float, weight: float, onward: Tensor
) -> Tensor:
    """Return the derivative of the augmented Lagrangian with respect to lambda_k.

        c (2 beta (lambda_k - X^{k-1}) - kappa_k) + d(loss of stage k)/d lambda_k

    Args:
        variable: lambda_k, (s, ...), where stage k has begun.
        state: X^{k-1}, (s, ...), where stage k - 1 has ended.
        multiplier: kappa_k; None is zero.
        beta: the penalty coefficient.
        weight: c, as in `local_loss`.
        onward: derivative of the loss of stage k with respect to lambda_k.

    Source: Sun et al. 2021, eq. 23.
    """
    bound = 2.0 * beta * (variable - state)
    if multiplier is not None:
        bound = bound - multiplier
    return weight * bound + onward


def next_multiplier(multiplier: Tensor, variable: Tensor, state: Tensor, rate: float) -> Tensor:
    """Return `kappa - rate (lambda - X)`.

    The rate that follows from the stationarity `lambda - X = (kappa - p / c) / (2 beta)` (eq. 17) is 2 beta: then the
    new multiplier is `p / c`, and the violation vanishes. The paper prints eta / (2 beta) (eq. 24), the inverse.
    """
    return multiplier - rate * (variable - state)


def violations(variable: Tensor, state: Tensor) -> Tensor:
    """Return `norm(lambda - X)` and `norm(X)` of a batch, (2,)."""
    return torch.stack([torch.linalg.vector_norm(variable - state), torch.linalg.vector_norm(state)])
