"""Watches how far the multigrid gradient is from the serial one: adds cycles, or chooses the cheapest way to solve."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, ClassVar

import torch
from torch import Tensor

from mlotool.layerparallel.multigrid.solver import Method

# The Euclidean norm () over all ranks that share the layers, from that of one's own entries.
Norm = Callable[[Tensor], Tensor]

# Factors that are considered.
COARSENINGS = (2, 3, 4, 6, 8, 12, 16, 24, 32)

# The second comparison follows after such a part of the usual number of steps.
SOONER = 10

# Cheaper plans that are tried at a later comparison.
TRIES = 3


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
        sizes = [(norm((mine - theirs).norm()), norm(theirs.norm())) for mine, theirs in pairs]
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


@dataclass(frozen=True)
class Plan:
    """One way to solve the layers.

    Args:
        forward: how the states are solved.
        backward: how the adjoints are solved.
        cost: layer evaluations of one of them that wait for each other.

    Example:
        >>> Plan(Method(cycles=2), Method(cycles=2), cost=14).cost
        14
    """

    forward: Method
    backward: Method
    cost: int = 0


# Solves the batch at hand by another plan; None is a serial pass.
Measure = Callable[[Plan | None], Solved]


class AbstractGuard(ABC):
    """Compares every so many gradients with the serial one, hands on those that it has compared as the serial ones, and
    goes from one plan to another by the bias.

    Args:
        plans: makes those that there are; asked before the first step, when devices and ranks are known.
        every: training steps from one comparison to the next; 0 never compares.
        threshold: largest relative bias.

    Attributes:
        left: until the next comparison.
        plan: the one at hand; None is a serial pass.
        bias: of the last comparison (`Solved.bias`); None before the first.
        cosine: of the angle between the two gradients then, where the guard looks at it.

    Example:
        >>> guard: AbstractGuard = Guard(lambda: [Plan(Method(), Method())], every=1, threshold=0.1)
        >>> guard.begin(), guard.take_due()
        (False, True)
    """

    returns: ClassVar[bool] = False
    """Whether it comes back from a serial pass."""
    counters: ClassVar[tuple[str, ...]] = ("bias", "cosine", "left")
    """What it keeps beside its plan."""

    def __init__(self, plans: Callable[[], Sequence[Plan]], every: int, threshold: float) -> None:
        self.every, self.threshold, self.left = every, threshold, every
        self.bias: float | None = None
        self.cosine: float | None = None
        self._make_plans = plans
        self._plans: Sequence[Plan] | None = None
        # None: serial.
        self._index: int | None = 0
        self._is_due = False

    @abstractmethod
    def decide(self, solved: Solved, exact: Solved, measure: Measure, norm: Norm) -> None:
        """Measure the bias and act on it.

        Args:
            solved: by the methods of this step.
            exact: what serial passes have found.
            measure: solves the batch again, by another plan.
            norm: over all ranks that share the layers.
        """

    @abstractmethod
    def statistics(self) -> dict[str, float]:
        """Return the last comparison and what it led to."""

    @property
    def plans(self) -> Sequence[Plan]:
        """What there is to go to."""
        if self._plans is None:
            self._plans = self._make_plans()
            if not self._plans:
                _warn("no number of cycles has fewer sequential layers than a serial pass")
        return self._plans

    @property
    def plan(self) -> Plan | None:
        """The plan at hand; None is a serial pass."""
        return None if self._index is None else self.plans[self._index]

    @property
    def is_serial(self) -> bool:
        """Whether layers run one after the other until something else is decided."""
        return self._index is None

    def begin(self) -> bool:
        """Count one more training step; return whether its forward is a plain pass through the layers."""
        self._is_due = False
        if self.every and (bool(self.plans) if self.returns else not self.is_serial):
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

    def state_dict(self) -> dict[str, Any]:
        """Return the plan and the counters."""
        plan = None if self.plan is None else _key(self.plan)
        return {"plan": plan, **{name: vars(self)[name] for name in self.counters}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` has returned; where there is no such plan any more, from the beginning."""
        index = next((number for number, plan in enumerate(self.plans) if _key(plan) == state["plan"]), None)
        if index is not None or state["plan"] is None:
            vars(self).update({name: state[name] for name in self.counters}, _index=index)


class Guard(AbstractGuard):
    """Adds cycles where the multigrid gradient is too far from the serial one, and goes serial where that is no help.

    Near a minimum the gradient is a small difference of large parts, and inexact cycles give it a bias that no step
    size removes. After a bad gradient the next is compared too, so that cycles are added quickly. From a serial pass it
    never comes back.

    Args: as for `AbstractGuard`; each plan has a cycle more than the one before.

    Example:
        >>> guard = Guard(lambda: [Plan(Method(), Method())], every=2, threshold=0.1)
        >>> guard.begin(), guard.take_due(), guard.begin(), guard.take_due()
        (False, False, False, True)
        >>> exact, inexact = (Solved([torch.tensor([1.0, y])], torch.ones(1, 3)) for y in (0.0, 0.02))
        >>> _ = guard.compare(inexact, lambda plan: exact, lambda own: own)
        >>> round(guard.bias, 4), guard.extra_cycles
        (0.02, 0)
    """

    @property
    def extra_cycles(self) -> int:
        """How many cycles were added so far."""
        return len(self.plans) - 1 if self._index is None else self._index

    def decide(self, solved: Solved, exact: Solved, measure: Measure, norm: Norm) -> None:
        """Add a cycle, or go serial, where the bias is too large."""
        self.bias, self.cosine, self.left = solved.bias(exact, norm), solved.cosine(exact, norm), self.every
        # A NaN of multigrid is no small bias.
        if self.bias <= self.threshold:
            return
        self._index = self.extra_cycles + 1 if self.extra_cycles + 1 < len(self.plans) else None
        if self.is_serial:
            act = "the layers run serially from now on. Set more cycles, a smaller coarsening, or FCF relaxation."
        else:
            self.left = 1
            act = f"from now on there are {self.extra_cycles} more cycles than set. Set more if this happens often."
        fault = f"The multigrid gradient was {self.bias:.2g} (relative) from the serial one"
        warnings.warn(f"{fault}, more than guard_threshold={self.threshold:g}: {act}", stacklevel=2)

    def statistics(self) -> dict[str, float]:
        """Return the last comparison and what it led to."""
        if not self.every:
            return {}
        counters = {"extra_cycles": float(self.extra_cycles), "is_serial": float(self.is_serial)}
        if self.bias is None or self.cosine is None:
            return counters
        return {**counters, "gradient_bias": self.bias, "gradient_cosine": self.cosine}


class Choice(AbstractGuard):
    """Chooses the cheapest plan whose bias is within a bound, and a serial pass where there is none (`cycles: auto`).

    The first training step runs serially, and all plans are tried at its gradient, the cheapest first. Every so many
    steps later the plan at hand is compared again: where its bias has become too large, all are tried anew, and else
    some of the cheaper ones, others each time.

    Args: as for `AbstractGuard`; the plans are the cheapest first.

    Attributes:
        tried: number of the cheaper plan that is tried next.
        is_new: whether nothing has been chosen yet.

    Example:
        >>> choice = Choice(lambda: make_plans(64, Method(), 8, workers=8), every=100, threshold=0.1)
        >>> choice.is_serial, len(choice.plans)
        (True, 8)
    """

    returns = True
    counters = ("bias", "left", "tried", "is_new")

    def __init__(self, plans: Callable[[], Sequence[Plan]], every: int, threshold: float) -> None:
        super().__init__(plans, every, threshold)
        self._index, self.left, self.tried, self.is_new = None, 1, 0, True

    def decide(self, solved: Solved, exact: Solved, measure: Measure, norm: Norm) -> None:
        """Choose a plan."""
        before, self.bias = self._index, 0.0

        def is_near(index: int) -> bool:
            bias = (solved if index == before else measure(self.plans[index])).bias(exact, norm)
            # A NaN of multigrid is no small bias.
            is_small = bias <= self.threshold
            if is_small:
                self.bias = bias
            return is_small

        if self.is_new or (before is not None and not is_near(before)):
            self._index = next(filter(is_near, range(len(self.plans))), None)
        else:
            num_cheaper = len(self.plans) if before is None else before
            some = [(self.tried + number) % num_cheaper for number in range(min(TRIES, num_cheaper))]
            self._index = next(filter(is_near, some), before)
            tested = some[: some.index(self._index) + 1] if self._index in some else some
            self.tried = tested[-1] + 1 if tested else self.tried
        if self._index is None and (before is not None or self.is_new):
            _warn(f"none of {len(self.plans)} plans has a gradient within guard_threshold={self.threshold:g}")
        # The first gradients say least of those to come.
        self.left = max(1, self.every // SOONER) if self.is_new else self.every
        self.is_new = False

    def statistics(self) -> dict[str, float]:
        """Return the plan, and how far its gradient was from the serial one."""
        values = {"is_serial": float(self.is_serial)}
        if self.bias is not None:
            values["gradient_bias"] = self.bias
        if self.plan is not None:
            values |= {"cycles": float(self.plan.forward.cycles), "layers_in_a_row": float(self.plan.cost)}
        return values


def make_plans(
    num_layers: int, method: Method, max_cycles: int, workers: int, factors: Any = COARSENINGS, num_parts: int = 1
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
                chosen = replace(method, coarsening=factor, cycles=cycles)
                plans.append(Plan(chosen, chosen, cost))
    return sorted(plans, key=lambda plan: (plan.cost, plan.forward.cycles))


def _key(plan: Plan) -> list[Any]:
    return [plan.forward.coarsening, plan.forward.cycles, plan.backward.cycles]


def _warn(reason: str) -> None:
    advice = "Multigrid pays where many workers share many layers: set over_ranks=true on several ranks."
    warnings.warn(f"cycles: auto: {reason}, so the layers run one after the other. {advice}", stacklevel=3)
