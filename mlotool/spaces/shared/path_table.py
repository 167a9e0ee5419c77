"""The decisions of a shared space: what each model of it has decided."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mlotool.core.errors import ConfigError
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
        return any(all(path.get(name) == value for name, value in each) for each in self.conditions)


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
            raise ConfigError(
                f"decisions.{name}: found two decisions of this name; expected a name of its own for each, with the "
                "same candidates wherever it is asked for. Give a mutator another name."
            )
        if name not in self._candidates:
            check_number(name, len(self._candidates))
        self._candidates[name] = candidates
        self._conditions.setdefault(name, set()).add(condition)

    @property
    def decisions(self) -> tuple[SharedDecision, ...]:
        """All of them, in the order in which they were first asked for."""
        return tuple(
            SharedDecision(name, each, self._reduced(self._conditions[name])) for name, each in self._candidates.items()
        )

    def _reduced(self, conditions: set[Condition]) -> tuple[Condition, ...]:
        """Return conditions without decisions that do not matter, as each of their candidates will do."""
        found = set(conditions)
        while (wider := self._wider(found)) is not None:
            found = {each for each in found if not set(wider) <= set(each)} | {wider}
        return tuple(sorted(found, key=str))

    def _wider(self, conditions: set[Condition]) -> Condition | None:
        for condition in sorted(conditions, key=str):
            for position, (name, _) in enumerate(condition):
                before, after = condition[:position], condition[position + 1 :]
                if all((*before, (name, each), *after) in conditions for each in self._candidates[name]):
                    return (*before, *after)
        return None


def path_of(decisions: Sequence[SharedDecision], decide: Callable[[SharedDecision], Value]) -> dict[str, Value]:
    """Return a path, of which each decision is made by a function, in their order.

    Example:
        >>> path_of((SharedDecision("kernel", ("k3", "k5")),), lambda each: each.candidates[-1])
        {'kernel': 'k5'}
    """
    path: dict[str, Value] = {}
    for each in decisions:
        if each.is_asked(path):
            path[each.name] = decide(each)
    return path
