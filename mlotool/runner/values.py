"""The numbers of a run's ticks: losses and metrics over a window, learned values, hyperparameters."""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mlotool.core.errors import NonFiniteLossError
from mlotool.problem.rank_mean import Reduce, identity_reduce
from mlotool.program import Problem, Program, StepResult

Steps = Mapping[str, StepResult]

MAX_VALUES = 32
"""Learned values of one problem: more are no curves that one could tell apart."""


class Window:
    """Collects what ticks return, as tensors; turns it into numbers at a flush.

    Args:
        num_ticks: ticks that lie before the window.
        reduce: a mean over ranks, of which all flush and check after the same ticks: a NaN of one is one of all.
        explain: `(problem, problems that had stepped before) -> sentences`: what may have made its loss not finite.

    Attributes:
        stepped: the problems that have stepped, as far as losses were checked.

    Cost: a list append a tick; at a flush one stack and one transfer from the device.

    Example:
        >>> from mlotool.program import StepResult
        >>> window = Window()
        >>> window.append({"line": StepResult(torch.tensor(1.0), {})})
        >>> window.append({"line": StepResult(torch.tensor(3.0), {})})
        >>> window.flush()
        {'line/loss': 2.0}
    """

    def __init__(
        self,
        num_ticks: int = 0,
        reduce: Reduce = identity_reduce,
        explain: Callable[[str, set[str]], str] = lambda problem, stepped: "",
    ) -> None:
        self._ticks: list[Steps] = []
        # Numbers of ticks that have been read from the device already, by key.
        self._collected: dict[str, list[float]] = {}
        self._num_ticks_before = num_ticks
        self._reduce = reduce
        self._explain = explain
        self.stepped: set[str] = set()
        self.append = self._ticks.append

    def check(self) -> None:
        """Raise NonFiniteLossError, with the first bad tick, if a loss since the last check is NaN or infinite."""
        steps_taken = [step for steps in self._ticks for step in steps.values()]
        tensors = [tensor for step in steps_taken for tensor in (step.loss, *step.metrics.values())]
        numbers = iter(_numbers(tensors, self._reduce))
        for tick, steps in enumerate(self._ticks, start=self._num_ticks_before + 1):
            for problem, step in steps.items():
                loss = next(numbers)
                if not math.isfinite(loss):
                    raise NonFiniteLossError(problem, tick, loss, self._explain(problem, self.stepped))
                self.stepped.add(problem)
                self._collected.setdefault(f"{problem}/loss", []).append(loss)
                for name in step.metrics:
                    self._collected.setdefault(f"{problem}/{name}", []).append(next(numbers))
        self._num_ticks_before += len(self._ticks)
        self._ticks.clear()

    def flush(self) -> dict[str, float]:
        """Check the losses, return the mean of each `<problem>/<metric>` over the window and begin the next one."""
        self.check()
        means = {key: sum(numbers) / len(numbers) for key, numbers in self._collected.items()}
        self._collected = {}
        return means

    def state_dict(self) -> dict[str, Any]:
        """Check the losses, and return what was collected since the last flush, in plain containers."""
        self.check()
        return {key: list(numbers) for key, numbers in self._collected.items()}

    def load_state_dict(self, state: Mapping[str, Any], num_ticks: int) -> None:
        """Take it back; the next step belongs to tick `num_ticks + 1`."""
        self._ticks.clear()
        self._num_ticks_before = num_ticks
        self._collected = {key: [float(number) for number in numbers] for key, numbers in state.items()}


def _numbers(values: list[Tensor], reduce: Reduce) -> list[float]:
    """Return the means over ranks of what tensors of one element hold, by one transfer from the device."""
    if not values:
        return []
    # A metric may be on the CPU beside a loss on another device.
    device = values[0].device
    stacked = torch.stack([value.reshape(()).to(device) for value in values]).double()
    return reduce([stacked])[0].tolist()


def hyperparameters(problem: Problem, program: Program) -> dict[str, float]:
    """Return the step count and the hyperparameters: the learning rate, and what other problems give."""
    values = {f"{problem.name}/step": float(problem.num_steps)}
    if problem.optimizer is not None:
        # Not every optimizer has one.
        rate = problem.optimizer.param_groups[0].get("lr")
        values |= {} if rate is None else {f"{problem.name}/lr": float(rate)}
    with torch.no_grad():
        groups = program.hyperparameters(problem.name)
    for key in problem.settings.optimizer_roles:
        # Of several rates the mean.
        values[f"{problem.name}/{key}"] = torch.stack([group[key].mean() for group in groups or ()]).mean().item()
    return values


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

    def read(self) -> dict[str, float]:
        """Return the values by key."""
        values: dict[str, float] = {}
        for problem in self._problems:
            for name, tensor in (_called(problem) or problem.constants()).items():
                numbers = tensor.detach().double().flatten().tolist()
                keys = [name] if len(numbers) == 1 else [f"{name}_{index}" for index in range(len(numbers))]
                values |= {f"{problem.name}/learned_{key}": each for key, each in zip(keys, numbers, strict=True)}
        return values


def _is_small(problem: Problem) -> bool:
    is_whole = problem.settings.tasks is None and problem.shards is None and problem.parallel is None
    return is_whole and _are_few(list(problem.theta.values()))


def _are_few(values: list[Any]) -> bool:
    """Say whether values are real tensors of a few numbers."""
    if not all(isinstance(value, Tensor) and value.is_floating_point() for value in values):
        return False
    return 0 < sum(value.numel() for value in values) <= MAX_VALUES


def _called(problem: Problem) -> Mapping[str, Tensor]:
    """Return what the module gives when it is called; nothing where it takes arguments, or gives no few numbers."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(problem.module.forward).parameters.values()
    if any(parameter.default is parameter.empty and parameter.kind not in kinds for parameter in parameters):
        return {}
    devices = [device for device in problem.devices if device.type == "cuda"]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices):
            output = problem.pure(None, False)()
    # Of a user's forward it may be any error: it is not how the losses use the module.
    except Exception:
        return {}
    named = output if isinstance(output, Mapping) else {"value": output}
    return named if _are_few(list(named.values())) else {}
