"""Who did what when in a layer-parallel run, and how much faster that was."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from mlotool.core.errors import RunFileError
from mlotool.core.run_files import list_files, read_json
from mlotool.layerparallel.speedup import BatchSeconds, predicted_speedup

MAX_SPANS, MAX_STAGES, MAX_SECONDS = 20_000, 256, 1e9
MAX_FILES, MAX_BYTES = 100, 20_000_000
PREFIX = "parallel_"


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
        return self.seconds.serial / median(self._longest[batch] for batch in self.batches)

    @property
    def predicted(self) -> float:
        """What equation 27 says of the same parts."""
        return predicted_speedup(self.seconds, self.num_stages)

    def _of_rank(self, what: str, rank: int) -> float:
        """Return the median over batches."""
        return median(self._totals.get((what, rank, batch), 0.0) for batch in self.batches)

    @cached_property
    def _totals(self) -> dict[tuple[str, int, int], float]:
        """Seconds by kind of work, rank and batch."""
        found: dict[tuple[str, int, int], float] = {}
        for span in self.spans:
            key = span.what, span.rank, span.batch
            found[key] = found.get(key, 0.0) + span.end - span.begin
        return found

    @cached_property
    def _longest(self) -> dict[int, float]:
        """By batch, the seconds from the first to the last span of the rank where that is most."""
        ends: dict[tuple[int, int], tuple[float, float]] = {}
        for span in self.spans:
            begin, end = ends.get((span.batch, span.rank), (span.begin, span.end))
            ends[span.batch, span.rank] = min(begin, span.begin), max(end, span.end)
        found: dict[int, float] = {}
        for (batch, _), (begin, end) in ends.items():
            found[batch] = max(found.get(batch, 0.0), end - begin)
        return found


def read_timelines(run_dir: Path) -> tuple[list[Timeline], list[str]]:
    """Read every artifacts/parallel_<problem>.json of a run folder.

    Returns:
        the timelines, and a note for each file that cannot be drawn.
    """
    found, notes = [], []
    try:
        names = [Path(each) for each in list_files(run_dir, "artifacts", ".json", MAX_FILES)]
    except RunFileError as error:
        return [], [str(error)]
    for name in names:
        if not name.stem.startswith(PREFIX):
            continue
        try:
            found.append(_timeline(name.stem.removeprefix(PREFIX), read_json(run_dir, name, MAX_BYTES)))
        except (RunFileError, ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            notes.append(f"{name.as_posix()} could not be drawn: {type(error).__name__}, {error}")
    return found, notes


def _timeline(problem: str, content: Any) -> Timeline:
    spans = tuple(
        Span(int(each["rank"]), int(each["batch"]), str(each["what"]), float(each["begin"]), float(each["end"]))
        for each in content["spans"][:MAX_SPANS]
    )
    num_stages = int(content["stages"])
    good = [0 <= span.rank < num_stages and -MAX_SECONDS < span.begin <= span.end < MAX_SECONDS for span in spans]
    if not 1 <= num_stages <= MAX_STAGES or not spans or not all(good):
        raise ValueError(f"expected spans of ranks 0 to {num_stages - 1}, each ending after it begins")
    found = Timeline(problem, num_stages, spans, int(content.get("processes", num_stages)) > 1)
    if not found.seconds.serial > 0:
        raise ValueError("expected forward and backward passes that take some time")
    return found
