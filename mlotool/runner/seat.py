"""What a run asks of the process that it shares with other runs."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from mlotool.program import Schedule, StepResult
from mlotool.runner.process_settings import Interrupt

Keep = Callable[[Mapping[str, StepResult]], None]


class AbstractSeat(ABC):
    """The place of one run among several of a process.

    Attributes:
        interrupt: set from outside to stop after the tick at hand; one for all runs.
        shared: what runs share that are built from equal configs.
        is_first: whether the run is the first one to begin in this process.
    """

    interrupt: Interrupt
    shared: Any
    is_first: bool

    @abstractmethod
    def clock(self) -> float:
        """Return the seconds that this run has taken, with its share of what is done for all."""

    @abstractmethod
    def join(self, schedule: Schedule) -> None:
        """Say how far the run is, once its state is put back; one with no tick left takes its place all the same."""

    @abstractmethod
    def take_ticks(self, schedule: Schedule, count: int, keep: Keep, due_at: float) -> None:
        """Take ticks, while the other runs take theirs.

        Args:
            schedule: the run's.
            count: how many; fewer where the run is interrupted or its checkpoint is due.
            keep: takes the results of each tick.
            due_at: by `time.monotonic`, when the run's checkpoint is due.
        """
