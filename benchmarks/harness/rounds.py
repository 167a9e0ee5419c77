"""Interleaved timing: rivals take turns in short rounds, so that a noisy machine hits all of them alike."""

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Cycle = Callable[[], None]


@dataclass(frozen=True)
class Seconds:
    """What one cycle took in one round.

    Args:
        wall: elapsed.
        cpu: of this process; other processes on the machine do not show in it.
    """

    wall: float
    cpu: float


def interleave(
    rivals: Mapping[str, Callable[[], Cycle]], *, num_rounds: int, num_cycles: int, num_warmup: int = 2
) -> dict[str, list[Seconds]]:
    """Time `num_cycles` cycles of every rival in turn, `num_rounds` times.

    Each round builds its rival anew, so that every round does the same work from the same start; building and
    warming up are not timed.

    Args:
        rivals: by name, a function that builds the rival and returns its cycle.
        num_rounds: rounds.
        num_cycles: timed cycles a round.
        num_warmup: cycles before them.

    Returns:
        By name, the seconds a cycle of every round.
    """
    found: dict[str, list[Seconds]] = {name: [] for name in rivals}
    names = list(rivals)
    # What the imports made is out of the collector's sight: collecting between turns is cheap, and hits no turn.
    gc.collect()
    gc.freeze()
    try:
        for number in range(num_rounds):
            # Another one starts each round: what follows a rival in a fixed order would inherit its caches.
            for name in names[number % len(names) :] + names[: number % len(names)]:
                found[name].append(_time(rivals[name](), num_cycles, num_warmup))
    finally:
        gc.unfreeze()
    return found


def _time(cycle: Cycle, num_cycles: int, num_warmup: int) -> Seconds:
    for _ in range(num_warmup):
        cycle()
    gc.collect()
    _synchronize()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(num_cycles):
        cycle()
    _synchronize()
    return Seconds((time.perf_counter() - wall) / num_cycles, (time.process_time() - cpu) / num_cycles)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def summarize(found: Mapping[str, list[Seconds]], base: str, clock: str) -> dict[str, dict[str, float]]:
    """Return each rival's median milliseconds a cycle, and its ratio to `base` with the spread over rounds.

    The ratio is taken round by round: the median and the quartiles are those of the rounds' ratios. Beside it stands
    that of the fastest rounds, which on a busy machine are nearest to what an idle one would show.

    Args:
        found: from `interleave`.
        base: the rival that the others are compared to.
        clock: "cpu" or "wall".
    """
    summary = {}
    for name, seconds in found.items():
        own = [getattr(each, clock) for each in seconds]
        ratios = [mine / getattr(other, clock) for mine, other in zip(own, found[base], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        summary[name] = {
            "ms": 1e3 * statistics.median(own),
            "ratio": middle,
            "ratio_quartile_1": low,
            "ratio_quartile_3": high,
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
            "ms_fastest": 1e3 * min(own),
            "ratio_of_fastest": min(own) / min(getattr(each, clock) for each in found[base]),
        }
    return summary
