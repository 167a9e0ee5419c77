"""Watches how far the multigrid gradient is from the serial one: adds cycles, or chooses the cheapest way to solve."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from mlotool.layerparallel.multigrid.solver import Method

Methods = tuple[Method, Method]
"""Of the forward and of the backward solve."""
Norm = Callable[[Tensor], Tensor]
"""The Euclidean norm () over all ranks that share the layers, from that of one's own entries."""

COARSENINGS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Factors that are considered."""

SOONER = 10
"""The second comparison follows after such a part of the usual number of steps."""

TRIES = 3
"""Cheaper plans that are tried at a later comparison."""


@dataclass(frozen=True)
class Solved:
    """What one forward and backward solve have found.

    Args:
        gradient: with respect to u0 and each parameter; None where it is not needed.
        state: the last one (b, ...).

    Example:
        >>> exact, inexact = (Solved([torch.tensor([1.0, y])], torch.ones(1, 3)) for y in (0.0, 0.02))
        >>> round(inexact.bias(exact), 4)
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
        pairs = ((self.vector(), exact.vector()), (self.state.double(), exact.state.double()))
        # All ranks have the last state; that its sizes are added up as well makes them find the same bits.
        sizes = [(norm((one - other).norm()), norm(other.norm())) for one, other in pairs]
        return max(float(distance / size) if size else float(distance) for distance, size in sizes)

    def cosine(self, exact: "Solved", norm: Norm) -> float:
        """Return the cosine of the angle between two gradients, by norms, which ranks can add up."""
        mine, theirs = self.vector(), exact.vector()
        distance, one, other = (float(norm(vector.norm())) for vector in (mine - theirs, mine, theirs))
        return (one**2 + other**2 - distance**2) / (2 * one * other) if one and other else 0.0

    def is_comparable(self, norm: Norm) -> bool:
        """Say whether a relative error to this one means anything: it is finite, and the gradient is not zero."""
        sizes = [float(norm(values.norm())) for values in (self.vector(), self.state.double())]
        return all(map(isfinite, sizes)) and sizes[0] > 0

    def vector(self) -> Tensor:
        """Return the gradient as one vector."""
        return torch.cat([slope.flatten().double() for slope in self.gradient if slope is not None])


Measure = Callable[[Methods | None], Solved]
"""Solves the batch at hand with other methods; None is a serial pass."""


class AbstractGuard(ABC):
    """Compares every so many gradients with the serial one, and hands on those that it has compared as the serial ones.

    Attributes:
        every: training steps from one comparison to the next; 0 never compares.
        left: until the next one.
        is_serial: whether layers run one after the other until something else is decided.
        bias: of the last comparison (`Solved.bias`); None before the first.

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

    @property
    @abstractmethod
    def is_active(self) -> bool:
        """Whether steps are compared as things are."""

    @abstractmethod
    def methods(self, forward: Method, backward: Method) -> Methods | None:
        """Return how the layers are solved, in place of these settings; None is one after the other."""

    @abstractmethod
    def decide(self, solved: Solved, exact: Solved, measure: Measure, norm: Norm) -> None:
        """Measure the bias and act on it.

        Args:
            solved: by the methods of this step.
            exact: what serial passes have found.
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
        if self.every and self.is_active:
            self.left -= 1
            self._is_due = self.left <= 0
        return self.is_serial and not self._is_due

    def take_due(self) -> bool:
        """Return whether the gradient of this step is to be compared, to the first who asks."""
        is_due, self._is_due = self._is_due, False
        return is_due

    def compare(self, solved: Solved, measure: Measure, norm: Norm) -> Solved:
        """Compare what this step has found with the serial pass, which is returned, and decide by it."""
        exact = solved if self.is_serial else measure(None)
        if exact.is_comparable(norm):
            self.decide(solved, exact, measure, norm)
        else:
            self.left = 1
        return exact


@dataclass
class Guard(AbstractGuard):
    """Adds cycles where the multigrid gradient is too far from the serial one, and goes serial where that is no help.

    Near a minimum the gradient is a small difference of large parts, and inexact cycles give it a bias that no step
    size removes. After a bad gradient the next is compared too, so that cycles are added quickly.

    Args:
        every: training steps from one comparison to the next; 0 never compares.
        threshold: largest relative bias.
        max_cycles: to add.

    Attributes:
        cosine: of the angle between the two gradients of the last comparison.
        extra_cycles: added so far.

    Example:
        >>> guard, exact = Guard(every=2, threshold=0.1), Solved([torch.tensor([1.0, 0.0])], torch.ones(1, 3))
        >>> guard.begin(), guard.take_due(), guard.begin(), guard.take_due()
        (False, False, False, True)
        >>> inexact = Solved([torch.tensor([1.0, 0.02])], torch.ones(1, 3))
        >>> _ = guard.compare(inexact, lambda methods: exact, lambda own: own)
        >>> round(guard.bias, 4), guard.extra_cycles
        (0.02, 0)
    """

    every: int = 0
    threshold: float = 0.1
    max_cycles: int = 8

    def __post_init__(self) -> None:
        self.cosine: float | None = None
        self.extra_cycles, self.is_serial = 0, False
        self.left = self.every

    @property
    def is_active(self) -> bool:
        """Whether it has not gone serial, from which it never comes back."""
        return not self.is_serial

    def methods(self, forward: Method, backward: Method) -> Methods:
        """Return the settings with the cycles that were added."""
        extra = self.extra_cycles
        return replace(forward, cycles=forward.cycles + extra), replace(backward, cycles=backward.cycles + extra)

    def decide(self, solved: Solved, exact: Solved, measure: Measure, norm: Norm) -> None:
        """Add a cycle, or go serial, where the bias is too large."""
        self.bias, self.cosine, self.left = solved.bias(exact, norm), solved.cosine(exact, norm), self.every
        # A NaN of multigrid is no small bias.
        if self.bias <= self.threshold:
            return
        self.is_serial = self.extra_cycles >= self.max_cycles
        if self.is_serial:
            act = "the layers run serially from now on. Set more cycles, a smaller coarsening, or FCF relaxation."
        else:
            self.extra_cycles += 1
            self.left = 1
            act = f"from now on there are {self.extra_cycles} more cycles than set. Set more if this is the rule."
        warnings.warn(
            f"The multigrid gradient was {self.bias:.2g} (relative) from the serial one, more than "
            f"guard_threshold={self.threshold:g}: {act}",
            stacklevel=2,
        )

    def statistics(self) -> dict[str, float]:
        """Return the last comparison and what it led to."""
        if not self.every:
            return {}
        counters = {"extra_cycles": float(self.extra_cycles), "is_serial": float(self.is_serial)}
        if self.bias is None or self.cosine is None:
            return counters
        return {**counters, "gradient_bias": self.bias, "gradient_cosine": self.cosine}

    def state_dict(self) -> dict[str, Any]:
        """Return the counters."""
        return {key: getattr(self, key) for key in ("bias", "cosine", "extra_cycles", "is_serial", "left")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` has returned."""
        # What is missing is that of `cycles: auto`, which decides by itself.
        self.bias, self.cosine, self.left = state["bias"], state.get("cosine"), state["left"]
        self.extra_cycles, self.is_serial = state.get("extra_cycles", 0), state.get("is_serial", False)


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
    plans = []
    for factor in factors:
        # There has to be a coarse grid, and each rank gets as many chunks.
        is_divided = num_parts > 1 and isinstance(factor, int) and num_layers % (factor * num_parts) != 0
        if is_divided or (isinstance(factor, int) and num_layers // factor < 2):
            continue
        path = replace(method, coarsening=factor, cycles=0).path(num_layers, workers)
        # Without nested iteration all points start at the first state, which is no guess.
        for cycles in range(0 if method.nested else 1, max_cycles + 1):
            cost = path.start + cycles * sum(path.critical_by_level)
            if cost < num_layers:
                plans.append(Plan(replace(method, coarsening=factor, cycles=cycles), cost))
    return sorted(plans, key=lambda plan: (plan.cost, plan.method.cycles))


class Choice(AbstractGuard):
    """Chooses the cheapest plan whose bias is within a bound, and a serial pass where there is none (`cycles: auto`).

    The first training step runs serially, and all plans are tried at its gradient, the cheapest first. Every so many
    steps later the plan at hand is compared again: where its bias has become too large, all are tried anew, and else
    some of the cheaper ones, others each time.

    Args:
        plans: makes them, the cheapest first; asked before the first step, when devices and ranks are known.
        every: training steps from one comparison to the next.
        threshold: largest relative bias.

    Example:
        >>> choice = Choice(lambda: make_plans(64, Method(), 8, workers=8), every=100, threshold=0.1)
        >>> choice.is_serial, len(choice.plans)
        (True, 8)
    """

    def __init__(self, plans: Callable[[], Sequence[Plan]], every: int, threshold: float) -> None:
        self.every, self.threshold, self.left = every, threshold, 1
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

    @property
    def is_active(self) -> bool:
        """Whether there are plans: it comes back from a serial pass."""
        return bool(self.plans)

    def methods(self, forward: Method, backward: Method) -> Methods | None:
        """Return those of the plan; the settings do not count."""
        return None if self.plan is None else (self.plan.method, self.plan.method)

    def decide(self, solved: Solved, exact: Solved, measure: Measure, norm: Norm) -> None:
        """Choose a plan."""
        before, self.bias = self._index, 0.0

        def is_near(index: int) -> bool:
            method = self.plans[index].method
            bias = (solved if index == before else measure((method, method))).bias(exact, norm)
            # A NaN of multigrid is no small bias.
            is_small = bias <= self.threshold
            if is_small:
                self.bias = bias
            return is_small

        self._index = self._moved(before, is_near) if self._has_chosen else self._cheapest(is_near)
        if self._index is None and (before is not None or not self._has_chosen):
            _warn(f"of {len(self.plans)} plans none is within guard_threshold={self.threshold:g} of the gradient")
        # The first gradients say least of those to come.
        self.left = self.every if self._has_chosen else max(1, self.every // SOONER)
        self._has_chosen = True

    def statistics(self) -> dict[str, float]:
        """Return the plan, and how far its gradient was from the serial one."""
        values = {"is_serial": float(self.is_serial)}
        if self.bias is not None:
            values["gradient_bias"] = self.bias
        if self.plan is not None:
            values |= {"cycles": float(self.plan.method.cycles), "layers_in_a_row": float(self.plan.cost)}
        return values

    def state_dict(self) -> dict[str, Any]:
        """Return the plan and the counters."""
        counters = {"next": self._next, "has_chosen": self._has_chosen, "left": self.left}
        return {"bias": self.bias, "plan": None if self.plan is None else _key(self.plan), **counters}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` has returned; where there is no such plan any more, choose anew."""
        self.bias, self.left, self._next = state["bias"], state["left"], state.get("next", 0)
        self._has_chosen, plan = state.get("has_chosen", False), state.get("plan")
        self._index = None
        if plan is not None:
            numbers = (number for number, other in enumerate(self.plans) if _key(other) == tuple(plan))
            self._index = next(numbers, None)
            if self._index is None:
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


def _key(plan: Plan) -> tuple[Any, int]:
    return plan.method.coarsening, plan.method.cycles


def _warn(reason: str) -> None:
    warnings.warn(
        f"cycles: auto: {reason}, so the layers run one after the other. Multigrid pays where many workers share many "
        "layers: over_ranks=true with as many ranks as there are, or more layers.",
        stacklevel=3,
    )
