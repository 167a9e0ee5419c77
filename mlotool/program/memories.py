"""What the algorithms of a program keep, by problem."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from mlotool.core.arguments import require
from mlotool.core.plain_state import ADVICE, check_mapping
from mlotool.problem.interface import Memory
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

    def loaded(self, name: str, saved: Any, problems: Mapping[str, Problem]) -> Any:
        """Return what was kept for a problem; nothing is changed.

        Args:
            name: of the problem.
            saved: what `state_dict` has returned.
            problems: by name, to whose parameters the tensors are like.

        Raises:
            ConfigError: one of them is not, or it is no state at all.
        """
        algorithm, key = self._algorithms[name], f"state.{name}.hypergradient"
        check_mapping(key, saved)
        if algorithm is None:
            return None
        if type(algorithm).__module__.startswith("mlotool."):
            shapes = {tensor.shape for problem in problems.values() for tensor in problem.own}
            for tensor in tree_leaves(saved):
                is_right = not isinstance(tensor, Tensor) or tensor.dtype is torch.uint8
                is_right = is_right or tensor.dim() == 0 or tensor.shape in shapes
                require(is_right, key, tensor, "tensors in the shapes of parameters", ADVICE)
        return algorithm.load_state(saved)
