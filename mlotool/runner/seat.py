"""Who takes the ticks of a run: the run itself, or a process that several runs share."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from mlotool.distributed.collectives import Ranks
from mlotool.program import Schedule, StepResult
from mlotool.runner.distributed import AgreedInterrupt
from mlotool.runner.process_settings import Interrupt

Keep = Callable[[Mapping[str, StepResult]], None]


class AbstractSeat(ABC):
    """The place of a run in its process.

    Attributes:
        interrupt: set from outside to stop after the tick at hand.
        shared: what runs of the process share that are built from equal configs; None where there is one run.
        is_alone: whether the run has the process for itself.
        is_first: whether the run is the first one to begin in this process.
    """

    interrupt: Interrupt | AgreedInterrupt
    shared: Any = None
    is_alone: bool = False
    is_first: bool = False

    @abstractmethod
    def clock(self) -> float:
        """Return the seconds that this run has taken, with its share of what is done for all."""

    @abstractmethod
    def join(self, schedule: Schedule) -> None:
        """Say how far the run is, once its state is put back; one with no tick left takes its place all the same."""

    @abstractmethod
    def take_ticks(self, schedule: Schedule, count: int, keep: Keep, due_at: float) -> None:
        """Take ticks of the run.

        Args:
            schedule: the run's.
            count: how many; fewer where the run is interrupted or its checkpoint is due.
            keep: takes the results of each tick.
            due_at: by `time.monotonic`, when the run's checkpoint is due.
        """


class OwnProcess(AbstractSeat):
    """The place of a run that has its process for itself.

    Args:
        ranks: those of the run, which all stop after the same tick.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.is_alone = self.is_first = True
        interrupt = Interrupt()
        self.interrupt = interrupt if ranks.size == 1 else AgreedInterrupt(interrupt, ranks)

    def clock(self) -> float:
        """Return the seconds of the clock on the wall."""
        return time.perf_counter()

    def join(self, schedule: Schedule) -> None:
        """There is nobody to join."""

    def take_ticks(self, schedule: Schedule, count: int, keep: Keep, due_at: float) -> None:
        """Take them one after the other. The hot path: nothing is read from the device, logged or written here."""
        for _ in range(count):
            keep(schedule.tick())
            if self.interrupt.seen() or time.monotonic() >= due_at:
                return
