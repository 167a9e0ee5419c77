"""Which path a mini-batch takes through a shared space."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mlotool.core.errors import ConfigError
from mlotool.core.private import is_batchedtensor
from mlotool.core.settings import target
from mlotool.spaces.decisions import Value, check_number

Condition = tuple[tuple[str, Value], ...]
"""Decisions that have to be made so: all of them."""

Path = Mapping[str, Value]
"""One model of a space: a candidate for each decision that it asks for, by name."""


@dataclass(frozen=True)
class SharedDecision:
    """A decision of a shared space.

    Args:
        name: its own.
        candidates: in their order.
        conditions: it is asked for where one of them holds.

    Example:
        >>> depth = SharedDecision("kernel_1", ("k3", "k5"), ((("depth", 2),), (("depth", 3),)))
        >>> depth.is_asked({"depth": 1}), depth.is_asked({"depth": 3})
        (False, True)
    """

    name: str
    candidates: tuple[Value, ...]
    conditions: tuple[Condition, ...] = ((),)

    def is_asked(self, path: Path) -> bool:
        """Say whether a model with these earlier decisions asks for it."""
        return any(all(path.get(name) == value for name, value in condition) for condition in self.conditions)


class PathTable:
    """Takes note of decisions while a shared space is made."""

    def __init__(self) -> None:
        self._candidates: dict[str, tuple[Value, ...]] = {}
        self._conditions: dict[str, set[Condition]] = {}
        self._owners: dict[str, str] = {}

    def note(self, mutator: str, name: str, candidates: tuple[Value, ...], condition: Condition) -> None:
        """Take note that a decision is asked for.

        Raises:
            ConfigError: another mutator has a decision of this name, it has other candidates, or there are too many.
        """
        if self._owners.setdefault(name, mutator) != mutator or self._candidates.get(name, candidates) != candidates:
            raise ConfigError(f"decisions.{name}: found two decisions of this name. Give a mutator another name.")
        if name not in self._candidates:
            check_number(name, len(self._candidates))
        self._candidates[name] = candidates
        self._conditions.setdefault(name, set()).add(condition)

    @property
    def decisions(self) -> tuple[SharedDecision, ...]:
        """All of them, in the order in which they were first asked for."""
        return tuple(
            SharedDecision(name, candidates, tuple(sorted(self._conditions[name], key=str)))
            for name, candidates in self._candidates.items()
        )


def path_of(decisions: Sequence[SharedDecision], decide: Callable[[SharedDecision], Value]) -> dict[str, Value]:
    """Return a path, of which each decision is made by a function, in their order.

    Example:
        >>> path_of((SharedDecision("kernel", ("k3", "k5")),), lambda each: each.candidates[-1])
        {'kernel': 'k5'}
    """
    path: dict[str, Value] = {}
    for decision in decisions:
        if decision.is_asked(path):
            path[decision.name] = decide(decision)
    return path


class AbstractPaths(nn.Module):
    """Draws paths.

    What it keeps from one draw to the next is a buffer, so that a run that goes on draws what it would have drawn.
    Random numbers are torch's, from its default generator.

    Example:
        >>> class First(AbstractPaths):
        ...     def forward(self, decisions):
        ...         return path_of(decisions, lambda each: each.candidates[0])
        >>> First()([SharedDecision("kernel", ("k3", "k5"))])
        {'kernel': 'k3'}
    """

    def begin(self, decisions: Sequence[SharedDecision]) -> None:
        """Make the buffers for a space with these decisions, if it has any."""

    @abstractmethod
    def forward(self, decisions: Sequence[SharedDecision]) -> Path:
        """Return a path.

        Args:
            decisions: of the space, in the order in which they are asked for.
        """


def number_drawn(drawn: Tensor) -> int:
    """Return a number that was drawn.

    Args:
        drawn: one element.

    Raises:
        ConfigError: there is one for each task.

    Example:
        >>> number_drawn(torch.tensor([2]))
        2
    """
    if is_batchedtensor(drawn):
        found = "tasks: found a path that is drawn in a loss of several tasks, which are computed as one program"
        raise ConfigError(f"{found}. Set tasks to null, or write mlotool.spaces.PathWeights.")
    return int(drawn)


@target("module")
class UniformPaths(AbstractPaths):
    """Draws each decision from its candidates, all with the same probability.

    Source: Guo et al. 2020, Single Path One-Shot Neural Architecture Search (arXiv 1904.00420), section 3.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> UniformPaths()([SharedDecision("kernel", ("k3", "k5"))])
        {'kernel': 'k3'}
    """

    def forward(self, decisions: Sequence[SharedDecision]) -> Path:
        """Return a path."""
        return path_of(
            decisions, lambda decision: decision.candidates[number_drawn(torch.randint(len(decision.candidates), ()))]
        )


@target("module")
class FairPaths(AbstractPaths):
    """Draws each decision's candidates in turn, in an order that is drawn anew when all have had theirs.

    Of a decision with k candidates, each is taken once in k paths that ask for it, so that all are trained equally
    often.

    Source: Chu et al. 2021, FairNAS (arXiv 1907.01845), section 3.2.

    Example:
        >>> paths, decisions = FairPaths(), [SharedDecision("kernel", ("k3", "k5"))]
        >>> paths.begin(decisions)
        >>> sorted(paths(decisions)["kernel"] for _ in range(4))
        ['k3', 'k3', 'k5', 'k5']

    Attributes:
        left: (decisions, most candidates), bool: which have not had their turn.
    """

    left: Tensor

    def begin(self, decisions: Sequence[SharedDecision]) -> None:
        """Let all candidates be left."""
        most = max((len(decision.candidates) for decision in decisions), default=0)
        self.register_buffer("left", torch.zeros(len(decisions), most, dtype=torch.bool))

    def forward(self, decisions: Sequence[SharedDecision]) -> Path:
        """Return a path; in evaluation, what is left stays."""
        rows = dict(zip([decision.name for decision in decisions], self.left.unbind(), strict=True))
        return path_of(
            decisions, lambda decision: decision.candidates[self._drawn(rows[decision.name], len(decision.candidates))]
        )

    def _drawn(self, left: Tensor, count: int) -> int:
        open_ones = left[:count].nonzero().flatten().tolist() or list(range(count))
        found: int = open_ones[number_drawn(torch.randint(len(open_ones), ()))]
        if self.training:
            left[:count] = False
            left[[each for each in open_ones if each != found]] = True
        return found
