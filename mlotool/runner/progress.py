"""What a user watches: the trainer's clock, in ticks, and the progress bar."""

import time
from collections import deque
from collections.abc import Iterable, Mapping
from datetime import timedelta

from pytorch_lightning import Trainer
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

SECONDS_BETWEEN_REFRESHES = 0.25
SECONDS_BETWEEN_LINES = 2.0
SECONDS_OF_RATE = 5.0
"""What `ticks/s` looks back at: a warm-up, or a compilation, is forgotten after it."""


def advance_clock(trainer: Trainer, num_ticks: int) -> None:
    """Make `trainer.global_step` count ticks.

    With raw optimizers Lightning counts nothing, and ModelCheckpoint, which compares steps, would never save. The
    counter is private API; a test holds the contract.
    """
    trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress.increment_by(num_ticks)


class ProgressDisplay:
    """The ticks and the last values of a run; refreshed at flushes.

    On a terminal it is a live display; elsewhere (a log file, a cluster's output) a line now and then, at evaluations.

    Not Lightning's: its bar would show chunks of a round, and no problems.

    Args:
        problems: names of the problems.
        max_ticks: ticks of the run.
        enabled: False shows nothing.
        console: where it is shown.
    """

    def __init__(
        self, problems: Iterable[str], max_ticks: int, *, enabled: bool = True, console: Console | None = None
    ) -> None:
        self._problems = list(problems)
        self._max_ticks = max_ticks
        self._enabled = enabled
        self._console = console or Console(stderr=True)
        self._live = Live(console=self._console, auto_refresh=False)
        self._shown_at = float("-inf")
        # Times and ticks, oldest first: the newest from before the time that the rate looks back at, and all since.
        self._seen: deque[tuple[float, int]] = deque()

    def start(self, tick: int) -> None:
        """Begin to show progress, from `tick` on."""
        self._seen = deque([(time.monotonic(), tick)])
        if self._enabled and self._console.is_terminal:
            self._live.start()

    def update(self, tick: int, values: Mapping[str, float], *, is_last: bool = False) -> None:
        """Show the last logged values; it costs a millisecond, so not more often than four times a second."""
        rate = self._rate(tick)
        now = self._seen[-1][0]
        if self._live.is_started and (is_last or now - self._shown_at >= SECONDS_BETWEEN_REFRESHES):
            self._shown_at = now
            self._live.update(self._table(tick, rate, values), refresh=True)

    def note(self, tick: int, values: Mapping[str, float]) -> None:
        """Tell of an evaluation, where there is no live display."""
        rate = self._rate(tick)
        now = self._seen[-1][0]
        is_due = tick == self._max_ticks or now - self._shown_at >= SECONDS_BETWEEN_LINES
        if self._enabled and not self._live.is_started and is_due:
            self._shown_at = now
            text = "  ".join(f"{key} {value:.4g}" for key, value in values.items())
            line = f"tick {tick}/{self._max_ticks}  {text}  {rate:.3g} ticks/s"
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def stop(self) -> None:
        """Leave the last picture and give the terminal back."""
        self._live.stop()

    def _rate(self, tick: int) -> float:
        """Note the time of a tick, and return the ticks a second of late."""
        now = time.monotonic()
        self._seen.append((now, tick))
        while len(self._seen) > 2 and self._seen[1][0] <= now - SECONDS_OF_RATE:
            self._seen.popleft()
        began, first = self._seen[0]
        return (tick - first) / max(now - began, 1e-9)

    def _table(self, tick: int, rate: float, values: Mapping[str, float]) -> Table:
        table = Table(box=None, pad_edge=False, show_header=False)
        left = f", {timedelta(seconds=round((self._max_ticks - tick) / rate))} left" if rate else ""
        bar = ProgressBar(self._max_ticks, tick, width=40)
        table.add_row(bar, f"{tick}/{self._max_ticks} ticks", f"{rate:.3g} ticks/s{left}")
        for name in self._problems:
            loss, steps = values.get(f"{name}/loss"), values.get(f"{name}/step", 0)
            table.add_row(name, "" if loss is None else f"loss {loss:.4g}", f"{steps:.0f} steps")
        for key, value in values.items():
            if key.split("/")[0] not in self._problems:
                table.add_row(key, f"{value:.4g}", "")
        return table
