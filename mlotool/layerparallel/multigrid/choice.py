"""`cycles: auto`: the cheapest cycles and coarsening whose gradient is near enough to the serial one."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlotool.core.errors import ConfigError
from mlotool.layerparallel.multigrid.guard import AbstractGuard, Measure, Methods, Norm, Solved, check_guard
from mlotool.layerparallel.multigrid.settings import Method

COARSENINGS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Factors that are considered."""

SOONER = 10
"""The second comparison follows after such a part of the usual number of steps."""

TRIES = 3
"""Cheaper plans that are tried at a later comparison."""


@dataclass(frozen=True)
class Plan:
    """One way to solve the layers.

    Args:
        method: of the forward and of the backward solve.
        cost: layer evaluations of one of them that wait for each other.

    Example:
        >>> Plan(Method(cycles=2), cost=14).cost
        14
    """

    method: Method
    cost: int


def make_plans(
    num_layers: int,
    method: Method,
    max_cycles: int,
    workers: int,
    *,
    factors: Sequence[int | Sequence[int]] = COARSENINGS,
    num_parts: int = 1,
) -> list[Plan]:
    """Return all that cost less than a serial pass, the cheapest first.

    Args:
        num_layers: N.
        method: what all plans share; its coarsening and its cycles are not looked at.
        max_cycles: at most so many.
        workers: chunks that are evaluated at once.
        factors: of coarsening, that are considered.
        num_parts: ranks that share the layers, which have equally many chunks.

    Example:
        >>> [plan.cost for plan in make_plans(64, Method(), max_cycles=8, workers=8, factors=[8])]
        [33, 58]
        >>> make_plans(64, Method(), max_cycles=8, workers=1)
        []
    """
    found = []
    for factor in factors:
        # There has to be a coarse grid, and each rank gets as many chunks.
        is_divided = num_parts > 1 and isinstance(factor, int) and num_layers % (factor * num_parts) != 0
        if is_divided or (isinstance(factor, int) and num_layers // factor < 2):
            continue
        # Without nested iteration all points start at the first state, which is no guess.
        for cycles in range(0 if method.nested else 1, max_cycles + 1):
            candidate = replace(method, coarsening=factor, cycles=cycles)
            cost = candidate.critical(num_layers, workers)
            if cost < num_layers:
                found.append(Plan(candidate, cost))
    return sorted(found, key=lambda plan: (plan.cost, plan.method.cycles))


class Choice(AbstractGuard):
    """Chooses the cheapest plan whose bias is within a bound, and a serial pass where there is none.

    The first training step runs serially, and all plans are tried at its gradient, the cheapest first. Every so many
    steps later the plan at hand is compared again: where its bias has become too large, all are tried anew, and else
    some of the cheaper ones, others each time. A gradient that was compared is handed on as the serial one.

    Args:
        plans: makes them, the cheapest first; asked before the first step, when devices and ranks are known.
        every: training steps from one comparison to the next.
        threshold: largest relative bias, see `Solved.bias`.

    Attributes:
        bias: of the plan at hand, at the last comparison; None before the first.

    Raises:
        ConfigError: a setting is out of range.

    Example:
        >>> choice = Choice(lambda: make_plans(64, Method(), 8, workers=8), every=100, threshold=0.1)
        >>> choice.is_serial, len(choice.plans)
        (True, 8)
    """

    def __init__(self, plans: Callable[[], Sequence[Plan]], every: int, threshold: float) -> None:
        check_guard(every, threshold, 0)
        if not every:
            raise ConfigError(
                "guard_every: found 0 with cycles=auto; expected the steps from one comparison to the next. Leave "
                "guard_every out."
            )
        self.every, self.threshold = every, threshold
        self.left = 1
        self._make_plans = plans
        self._plans: Sequence[Plan] | None = None
        # None: serial.
        self._index: int | None = None
        self._next = 0
        self._has_chosen = False

    @property
    def plans(self) -> Sequence[Plan]:
        """What there is to choose from."""
        if self._plans is None:
            self._plans = self._make_plans()
            if not self._plans:
                _warn("no cycles evaluate fewer layers one after the other than a serial pass does here")
        return self._plans

    @property
    def plan(self) -> Plan | None:
        """The plan at hand; None is a serial pass."""
        return None if self._index is None else self.plans[self._index]

    @property
    def is_serial(self) -> bool:  # type: ignore[override]
        """Whether the plan is a serial pass."""
        return self._index is None

    def _looks_again(self) -> bool:
        return bool(self.plans)

    def methods(self, forward: Method, backward: Method) -> Methods | None:
        """Return those of the plan; the settings do not count."""
        return None if self.plan is None else (self.plan.method, self.plan.method)

    def compare(self, found: Solved, measure: Measure, norm: Norm) -> Solved:
        """Choose; return the serial gradient."""
        exact = found if self._index is None else measure(None)
        if not exact.is_comparable(norm):
            self.left = 1
            return exact

        def is_near(index: int) -> bool:
            method = self.plans[index].method
            solved = found if index == self._index else measure((method, method))
            bias = solved.bias(exact, norm)
            # A NaN of multigrid is no small bias.
            if not bias <= self.threshold:
                return False
            self.bias = bias
            return True

        before, self.bias = self._index, 0.0
        self._index = self._moved(before, is_near) if self._has_chosen else self._cheapest(is_near)
        if self._index is None and (before is not None or not self._has_chosen):
            _warn(f"of {len(self.plans)} plans none is within guard_threshold={self.threshold:g} of the gradient")
        # The first gradients say least of those to come.
        self.left = self.every if self._has_chosen else max(1, self.every // SOONER)
        self._has_chosen = True
        return exact

    def statistics(self) -> dict[str, float]:
        """Return the plan, and how far its gradient was from the serial one."""
        found = {"is_serial": float(self.is_serial)}
        if self.bias is not None:
            found["gradient_bias"] = self.bias
        if self.plan is not None:
            found["cycles"] = float(self.plan.method.cycles)
            found["layers_in_a_row"] = float(self.plan.cost)
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the plan and the counters."""
        plan = None if self.plan is None else (self.plan.method.coarsening, self.plan.method.cycles)
        kept = {"next": self._next, "has_chosen": self._has_chosen, "left": self.left}
        return {"bias": self.bias, "plan": plan, **kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` has returned; where there is no such plan any more, choose anew."""
        self.bias, self.left, self._next = state["bias"], state["left"], state.get("next", 0)
        self._has_chosen, kept = state.get("has_chosen", False), state.get("plan")
        self._index = None
        if kept is not None:
            plans: list[tuple[Any, ...]] = [(plan.method.coarsening, plan.method.cycles) for plan in self.plans]
            if tuple(kept) in plans:
                self._index = plans.index(tuple(kept))
            else:
                self._has_chosen, self.left = False, 1

    def _moved(self, before: int | None, is_near: Callable[[int], bool]) -> int | None:
        """Return the plan after a comparison: the cheapest of all if that at hand is too far off, else one of three."""
        if before is not None and not is_near(before):
            return self._cheapest(is_near)
        num_cheaper = len(self.plans) if before is None else before
        for _ in range(min(TRIES, num_cheaper)):
            index = self._next % num_cheaper
            self._next = index + 1
            if is_near(index):
                return index
        return before

    def _cheapest(self, is_near: Callable[[int], bool]) -> int | None:
        return next(filter(is_near, range(len(self.plans))), None)


def _warn(reason: str) -> None:
    warnings.warn(
        f"cycles: auto: {reason}, so the layers run one after the other. Multigrid pays where many workers share many "
        "layers: over_ranks=true with as many ranks as there are, or more layers.",
        stacklevel=3,
    )
