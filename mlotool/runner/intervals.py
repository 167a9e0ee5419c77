"""When a run evaluates and logs: its stops, in ticks. When a checkpoint is due, `checkpoint.py` says."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mlotool.program import Schedule
from mlotool.runner.evaluation import Objective

# Rounds (and with them checkpoints) of a run whose objective is not evaluated at an interval.
CHUNKS_PER_ROUND = 5


@dataclass(frozen=True)
class TickPlan:
    """The stops of a run, in ticks.

    A chunk is one `training_step`; it also ends where a split is evaluated. A round is one epoch of the trainer: it
    ends where the objective is evaluated, and checkpoints are written and early stopping is decided at its end.

    Args:
        max_ticks: ticks of the whole run.
        ticks_per_chunk: the longest chunk; Lightning costs 0.3-0.6 ms a chunk.
        log_every: ticks between two flushes of the losses.
        evaluation_intervals: ticks between two evaluations, by split.
        round_ticks: ticks of a round.
        inherited_splits: evaluated before the first tick, as what a run begins with.

    Example:
        >>> plan = TickPlan(100, 50, 50, {"val": 40}, 40)
        >>> plan.chunk_end(0), plan.chunk_end(40), plan.round_end(80), plan.due_splits(40)
        (40, 80, 100, ['val'])
    """

    max_ticks: int
    ticks_per_chunk: int
    log_every: int
    evaluation_intervals: dict[str, int]
    round_ticks: int
    inherited_splits: tuple[str, ...] = ()

    @property
    def begins_with_evaluation(self) -> bool:
        """Whether there are evaluations before the first tick: what was inherited, or all of a run without ticks."""
        return self.max_ticks == 0 or bool(self.inherited_splits)

    def round_end(self, tick: int) -> int:
        """Return where the round ends that goes on after `tick`."""
        return min(_next_multiple(tick, self.round_ticks), self.max_ticks)

    def num_rounds(self, tick: int, *, is_pending: bool) -> int:
        """Return the rounds that have ended; the one that ends at `tick` has not while its evaluations are pending."""
        return max(tick - is_pending, 0) // self.round_ticks

    def chunk_end(self, tick: int) -> int:
        """Return where the chunk ends that begins after `tick`."""
        evaluations = (_next_multiple(tick, interval) for interval in self.evaluation_intervals.values())
        return min(tick + self.ticks_per_chunk, self.round_end(tick), *evaluations)

    def flush_end(self, tick: int, chunk_end: int) -> int:
        """Return where losses are flushed next, or the chunk's end where that comes first."""
        return min(_next_multiple(tick, self.log_every), chunk_end)

    def is_flush(self, tick: int) -> bool:
        """Say whether losses are flushed at `tick`."""
        return tick % self.log_every == 0 or tick == self.max_ticks

    def due_splits(self, tick: int) -> list[str]:
        """Return the splits to evaluate at `tick`; at the last tick, all that have an interval."""
        return [
            split
            for split, interval in self.evaluation_intervals.items()
            if (tick > 0 and tick % interval == 0) or tick == self.max_ticks
        ]


@dataclass
class ChunkLoader:
    """What the trainer iterates over: the chunks `(begin, end)` of one round.

    It has no state of its own: an iteration begins at the schedule's tick, so a resumed schedule resumes it, and a
    second epoch is not empty.

    Args:
        plan: where chunks and rounds end.
        schedule: counts the ticks.
        is_pending: returns whether the evaluations of the schedule's tick are still to come, in a first chunk without
            ticks.
    """

    plan: TickPlan
    schedule: Schedule
    is_pending: Callable[[], bool] = lambda: False

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield the chunks of the round that begins now."""
        # Lightning fetches one chunk ahead, so only the first may ask the schedule.
        begin = self.schedule.num_ticks
        # A run that is resumed in a later round is iterated twice before its first chunk.
        if self.is_pending():
            yield begin, begin
            round_end = self.plan.round_end(max(begin - 1, 0))
        else:
            round_end = self.plan.round_end(begin)
        while begin < round_end:
            end = self.plan.chunk_end(begin)
            yield begin, end
            begin = end


def _next_multiple(tick: int, interval: int) -> int:
    return (tick // interval + 1) * interval


def make_plan(config: Any, objective: Objective) -> TickPlan:
    """Lay out a run's ticks: rounds end where the objective is evaluated."""
    runner = config.runner
    limit = config.debug.limit_ticks
    splits = {} if config.evaluate is None else dict(config.evaluate.splits)
    intervals = {split: every for split, every in splits.items() if isinstance(every, int)}
    source = (objective.key or "").partition("/")[0]
    # Without an evaluated objective a round is a whole number of flushes, so that a training loss is there to watch.
    flushes = -(-CHUNKS_PER_ROUND * runner.ticks_per_chunk // runner.log_every)
    max_ticks = runner.max_ticks if limit is None else min(runner.max_ticks, limit)
    round_ticks = intervals.get(source, flushes * runner.log_every)
    inherited = tuple(splits) if config.get("inherit") is not None and max_ticks > 0 else ()
    return TickPlan(max_ticks, runner.ticks_per_chunk, runner.log_every, intervals, round_ticks, inherited)
