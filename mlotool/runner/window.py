"""The steps of the ticks since the last flush: nothing is read from the device in between."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mlotool.core.arguments import is_number, require
from mlotool.core.errors import NonFiniteLossError
from mlotool.core.plain_state import ADVICE
from mlotool.problem.rank_mean import Reduce, identity_reduce
from mlotool.program import StepResult
from mlotool.runner.blame import Traces

Steps = Mapping[str, StepResult]


class Window:
    """Collects what ticks return, as tensors; turns it into numbers at a flush.

    Args:
        num_ticks: ticks that lie before the window.
        reduce: a mean over ranks, of which all flush and check after the same ticks: a NaN of one is one of all.
        explain: `(problem, losses before) -> sentences`: what may have made that problem's loss not finite.

    Cost: a list append a tick; at a flush two stacks and two transfers from the device.

    Example:
        >>> from mlotool.program import StepResult
        >>> window = Window()
        >>> window.append({"line": StepResult(torch.tensor(1.0), {})})
        >>> window.append({"line": StepResult(torch.tensor(3.0), {})})
        >>> window.flush()
        {'line/loss': 2.0}
    """

    def __init__(
        self, num_ticks: int = 0, reduce: Reduce = identity_reduce, explain: Callable[[str, Traces], str] | None = None
    ) -> None:
        self._ticks: list[Steps] = []
        # Numbers of ticks that a checkpoint has read from the device already, by key.
        self._collected: dict[str, list[float]] = {}
        self._num_ticks_before = num_ticks
        self._num_checked = 0
        self._reduce = reduce
        self._explain = explain or (lambda problem, traces: "")
        self._traces = Traces(is_resumed=num_ticks > 0)
        self.append = self._ticks.append

    def restart(self, num_ticks: int) -> None:
        """Forget the collected steps; the next one belongs to tick `num_ticks + 1`."""
        self._collected = {}
        self._clear(num_ticks)

    def check(self) -> None:
        """Raise NonFiniteLossError, with the first bad tick, if a loss since the last check is NaN or infinite."""
        fresh = self._ticks[self._num_checked :]
        losses = [step.loss for steps in fresh for step in steps.values()]
        # One transfer for all.
        numbers = _numbers(losses, self._reduce)
        self._follow(fresh, numbers, self._num_ticks_before + self._num_checked)
        self._num_checked = len(self._ticks)

    def flush(self) -> dict[str, float]:
        """Check the losses, return the mean of each `<problem>/<metric>` over the window and begin the next one."""
        self._collect()
        means = {key: sum(numbers) / len(numbers) for key, numbers in self._collected.items()}
        self.restart(self._num_ticks_before)
        return means

    def state_dict(self) -> dict[str, Any]:
        """Check the losses, and return what was collected since the last flush, in plain containers."""
        self._collect()
        return {key: list(numbers) for key, numbers in self._collected.items()}

    def load_state_dict(self, state: Mapping[str, Any], num_ticks: int) -> None:
        """Take it back; the next step belongs to tick `num_ticks + 1`."""
        for key, numbers in state.items():
            is_right = isinstance(key, str) and isinstance(numbers, list) and len(numbers) > 0
            require(is_right and all(map(is_number, numbers)), f"window.{key}", numbers, "a list of numbers", ADVICE)
        self.restart(num_ticks)
        self._traces = Traces(is_resumed=num_ticks > 0)
        self._collected = {key: list(numbers) for key, numbers in state.items()}

    def _follow(self, fresh: list[Steps], numbers: list[float], num_ticks_before: int) -> None:
        """Note the losses, up to the first that is not finite, and raise for that one."""
        losses = iter(numbers)
        for tick, steps in enumerate(fresh, start=num_ticks_before + 1):
            for problem, value in zip(steps, losses, strict=False):
                if not math.isfinite(value):
                    raise NonFiniteLossError(problem, tick, value, self._explain(problem, self._traces))
                self._traces.add(problem, tick, value)

    def _clear(self, num_ticks: int) -> None:
        self._ticks.clear()
        self._num_ticks_before = num_ticks
        self._num_checked = 0

    def _collect(self) -> None:
        self.check()
        collected: dict[str, list[Tensor]] = {}
        for steps in self._ticks:
            for problem, step in steps.items():
                collected.setdefault(f"{problem}/loss", []).append(step.loss)
                for name, value in step.metrics.items():
                    collected.setdefault(f"{problem}/{name}", []).append(value)
        self._clear(self._num_ticks_before + len(self._ticks))
        numbers = iter(_numbers([value for values in collected.values() for value in values], self._reduce))
        for key, values in collected.items():
            self._collected.setdefault(key, []).extend(next(numbers) for _ in values)


def _numbers(values: list[Tensor], reduce: Reduce) -> list[float]:
    """Return the means over ranks of what tensors of one element hold, by one transfer from the device."""
    if not values:
        return []
    # Reshaping each of them would cost as much as the rest.
    numbers = [value if value.dim() == 0 else value.reshape(()) for value in values]
    # A metric may be on the CPU beside a loss on another device.
    device = numbers[0].device
    stacked = torch.stack([value if value.device == device else value.to(device) for value in numbers]).double()
    return reduce([stacked])[0].tolist()
