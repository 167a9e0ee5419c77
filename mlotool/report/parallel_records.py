"""Who did what when in a layer-parallel run, and how much faster that was."""

import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from mlotool.layerparallel.speedup import BatchSeconds, predicted_speedup

MAX_SPANS = 20_000


@dataclass(frozen=True)
class Span:
    """One piece of work.

    Args:
        rank: of the stage that did it.
        batch: counted from 0.
        what: forward, backward, auxnet, communication, or a word of another kind of work.
        begin: seconds.
        end: seconds.
    """

    rank: int
    batch: int
    what: str
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.begin


@dataclass(frozen=True)
class Timeline:
    """The first batches of a problem whose stages run on ranks of their own.

    Args:
        problem: its name.
        num_stages: K.
        spans: of all ranks; at least one.
        is_simultaneous: whether the stages are processes of their own; if not they work one after the other.
    """

    problem: str
    num_stages: int
    spans: tuple[Span, ...]
    is_simultaneous: bool = True

    @cached_property
    def batches(self) -> list[int]:
        """The recorded batches but the first one, which builds what the others find; all where there is no other."""
        found = sorted({span.batch for span in self.spans})
        return found[1:] or found

    @cached_property
    def seconds(self) -> BatchSeconds:
        """The parts of a batch: the passes of all stages together, and what the busiest rank does for the method."""
        auxiliary = max(self._of_rank("auxnet", rank) for rank in range(self.num_stages))
        forward, backward = (
            sum(self._of_rank(what, rank) for rank in range(self.num_stages)) for what in ("forward", "backward")
        )
        return BatchSeconds(forward, backward, auxiliary=auxiliary)

    @property
    def measured(self) -> float:
        """The passes of all stages, one after the other, over what a batch took from first to last span of a rank."""
        windows = [max(self._window(batch, rank) for rank in range(self.num_stages)) for batch in self.batches]
        return self.seconds.serial / median(windows)

    @property
    def predicted(self) -> float:
        """What equation 27 says of the same parts."""
        return predicted_speedup(self.seconds, self.num_stages)

    def _of_rank(self, what: str, rank: int) -> float:
        """Return the median over batches."""
        own = [span for span in self.spans if span.what == what and span.rank == rank]
        return median(sum(span.seconds for span in own if span.batch == batch) for batch in self.batches)

    def _window(self, batch: int, rank: int) -> float:
        own = [span for span in self.spans if span.batch == batch and span.rank == rank]
        return max(span.end for span in own) - min(span.begin for span in own) if own else 0.0


def read_timelines(folder: Path) -> tuple[list[Timeline], list[str]]:
    """Read every artifacts/parallel_<problem>.json.

    Returns:
        the timelines, and a note for each file that cannot be drawn.
    """
    found, notes = [], []
    for file in sorted(folder.glob("parallel_*.json")):
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            found.append(_timeline(file.stem.removeprefix("parallel_"), content))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            notes.append(f"artifacts/{file.name} could not be drawn: {type(error).__name__}, {error}")
    return found, notes


def _timeline(problem: str, content: Any) -> Timeline:
    spans = tuple(
        Span(int(each["rank"]), int(each["batch"]), str(each["what"]), float(each["begin"]), float(each["end"]))
        for each in content["spans"][:MAX_SPANS]
    )
    num_stages = int(content["stages"])
    good = [
        0 <= span.rank < num_stages and math.isfinite(span.begin) and span.begin <= span.end < math.inf
        for span in spans
    ]
    if not spans or not all(good):
        raise ValueError(f"expected spans of ranks 0 to {num_stages - 1}, each ending after it begins")
    return Timeline(problem, num_stages, spans, int(content.get("processes", num_stages)) > 1)
