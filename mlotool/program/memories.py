"""What the algorithms of a program keep, by problem."""

from collections.abc import Mapping
from typing import Any

from mlotool.problem.memory import Memory
from mlotool.problem.problem import Problem


class Memories:
    """What each problem's algorithm keeps from one pullback to the next, in one program.

    Args:
        problems: by name.
    """

    def __init__(self, problems: Mapping[str, Problem]) -> None:
        self.by_name: dict[str, Memory] = {}
        self._algorithms = {name: each.hypergradient for name, each in problems.items()}
        for name, algorithm in self._algorithms.items():
            self.by_name[name] = Memory(None if algorithm is None else algorithm.initial_state())

    def statistics(self, name: str) -> dict[str, float]:
        """Return numbers to log about the last pullback of a problem."""
        algorithm = self._algorithms[name]
        return {} if algorithm is None else algorithm.statistics(self.by_name[name].value)

    def state_dict(self, name: str) -> dict[str, Any]:
        """Return what is kept for a problem, in plain containers."""
        algorithm = self._algorithms[name]
        return {} if algorithm is None else algorithm.state_dict(self.by_name[name].value)

    def load_state_dict(self, name: str, saved: dict[str, Any]) -> None:
        """Take it back."""
        algorithm = self._algorithms[name]
        if algorithm is not None:
            self.by_name[name].value = algorithm.load_state(saved)
