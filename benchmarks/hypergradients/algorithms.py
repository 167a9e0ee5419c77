"""What is compared: one entry an algorithm, with the settings that all rivals use."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Algorithm:
    """One algorithm.

    Args:
        name: in the tables.
        kind: what the rivals look it up by.
        has_reference: whether `reference.py` has a plain autograd form of it that all rivals must agree with.
        num_calls: hypergradients taken at the same point before the error of the last counts: of those that keep a
            vector from one to the next.
        num_draws: hypergradients over which the root mean square of the error is taken: of random ones.
    """

    name: str
    kind: str
    has_reference: bool = True
    num_calls: int = 1
    num_draws: int = 1


ALGORITHMS = (
    Algorithm("Identity, reverse (T1-T2)", "identity"),
    Algorithm("Identity, finite differences (AID-FD)", "finite_difference"),
    Algorithm("the same, stop_gradient", "finite_difference_stop", has_reference=False),
    Algorithm("SAMA (OptimizerPreconditioner)", "sama"),
    Algorithm("Neumann", "neumann"),
    Algorithm("FixedPoint", "fixed_point"),
    Algorithm("ConjugateGradient", "cg"),
    Algorithm("NormalEquationConjugateGradient", "normal_cg"),
    Algorithm("Nystrom", "nystrom", has_reference=False),
    Algorithm("Exact", "exact"),
    Algorithm("KFAC", "kfac", has_reference=False),
    Algorithm("Unrolled, remat", "unrolled"),
    Algorithm("Unrolled, graphs kept", "unrolled_kept"),
    Algorithm("Unrolled, truncated to half, graphs kept", "truncated"),
    Algorithm("Penalty, fixed (F2SA)", "penalty", has_reference=False, num_calls=100),
    Algorithm("Penalty, barrier (BOME)", "barrier", has_reference=False, num_calls=100),
    Algorithm("SOBA", "soba", has_reference=False, num_calls=100),
    Algorithm("SABA", "saba", has_reference=False, num_calls=100),
    Algorithm("EvolutionStrategies", "evolution", has_reference=False, num_draws=5),
    Algorithm("FirstOrder (control)", "first_order", has_reference=False),
)

RADIUS = 0.01
"""Norm of a finite difference's perturbation; Betty's default for darts, set for its sama as well."""
MULTIPLIER, BARRIER, PENALTY_STEPS = 1000.0, 10.0, 5
NUM_PAIRS, SIGMA = 8, 0.01


class NotOfferedError(Exception):
    """A rival has no such algorithm, or cannot run it; the text says which."""


class Rival(Protocol):
    """One program under test, ready to run."""

    def hypergradient(self) -> list[Tensor]:
        """Return the upper problem's gradient at the current point, one tensor a parameter."""

    def cycle(self) -> None:
        """Take the lower steps and the upper step of one cycle."""


def by_kind(kind: str) -> Algorithm:
    """Return an algorithm."""
    return next(each for each in ALGORITHMS if each.kind == kind)


def flat(vector: Sequence[Tensor]) -> Tensor:
    """Return one vector in float64."""
    return torch.cat([each.detach().reshape(-1).double() for each in vector])
