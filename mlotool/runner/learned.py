"""What upper problems with few values have learned so far: rates, decays, temperatures, weights of classes."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mlotool.program import Problem, Program

MAX_VALUES = 32
"""Of one problem: more are no curves that one could tell apart."""


class LearnedValues:
    """Reads the values of the small upper problems of a program: for each flush, not for each tick.

    A module that can be called without arguments gives what the losses see, `<problem>/learned_value`, or
    `learned_value_<number>` of several; of others the parameters are read, `<problem>/learned_<name>`. Nothing in
    training changes by it: random numbers and buffers stay as they are.

    Args:
        program: the problems; those count that shape others and have at most `MAX_VALUES` trainable numbers.
    """

    def __init__(self, program: Program) -> None:
        self._problems = [
            problem
            for name, problem in program.problems.items()
            if name in program.graph.upper_to_lower and _is_small(problem)
        ]
        self._called = {problem.name for problem in self._problems if _takes_no_arguments(problem.module)}

    def read(self) -> dict[str, float]:
        """Return the values by key."""
        found: dict[str, float] = {}
        for problem in self._problems:
            named = self._given(problem) or {f"learned_{key}": each for key, each in problem.constants().items()}
            for name, tensor in named.items():
                numbers = tensor.detach().double().flatten().tolist()
                keys = [name] if len(numbers) == 1 else [f"{name}_{index}" for index in range(len(numbers))]
                found.update((f"{problem.name}/{key}", number) for key, number in zip(keys, numbers, strict=True))
        return found

    def _given(self, problem: Problem) -> dict[str, Tensor]:
        """Return what the module gives when it is called; nothing where that is not a few numbers."""
        if problem.name not in self._called:
            return {}
        try:
            given = _call(problem)
        # Of a stranger's forward it may be any error: it is not how the losses use the module.
        except Exception:
            given = None
        named = given if isinstance(given, Mapping) else {"value": given}
        named = {f"learned_{key}": each for key, each in named.items()}
        if all(map(_is_real, named.values())) and sum(each.numel() for each in named.values()) <= MAX_VALUES:
            return named
        self._called.discard(problem.name)
        return {}


def _is_small(problem: Problem) -> bool:
    is_whole = problem.settings.tasks is None and problem.shards is None and problem.parallel is None
    tensors = list(problem.theta.values())
    return is_whole and all(map(_is_real, tensors)) and 0 < sum(each.numel() for each in tensors) <= MAX_VALUES


def _is_real(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _takes_no_arguments(module: torch.nn.Module) -> bool:
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(module.forward).parameters.values()
    return all(each.default is not each.empty or each.kind in kinds for each in parameters)


@torch.no_grad()
def _call(problem: Problem) -> Any:
    devices = [device for device in problem.devices if device.type == "cuda"]
    with torch.random.fork_rng(devices):
        return problem.pure(None, False)()
