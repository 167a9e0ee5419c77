"""What a sweep's folder says of jobs that shared a process: which ran as one program, and what that gained."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from mlotool.core.errors import RunFileError
from mlotool.core.run_files import list_files, read_json, read_text
from mlotool.report.formats import shortened

FOLDER = "fusion"
MAX_FILES, MAX_STACKS, MAX_LINES = 2_000, 20_000, 12
MAX_REASON, MAX_PARTS = 300, 12
_WARNING = "mlotool: warning: "
# Of one tick: what is beside them is no measurement.
Seconds = Annotated[float, Field(gt=1e-9, lt=1e5, strict=True)]
Job = Annotated[int, Field(ge=0, lt=10**9, strict=True)]


@dataclass(frozen=True)
class StackNote:
    """Jobs that were tried as one program.

    Args:
        jobs: their numbers, in order.
        is_fused: whether they ran as one.
        fused_s: seconds of one tick of all as one program; None where it was not measured.
        alone_s: the same, one by one.
        reason: why they, or parts of their ticks, ran one by one; empty where they did not.
        until_tick: how many ticks those ran as one that went on one by one; None where they did not.
    """

    jobs: Annotated[tuple[Job, ...], Field(min_length=1), AfterValidator(lambda jobs: tuple(sorted(set(jobs))))]
    is_fused: bool
    fused_s: Seconds | None = None
    alone_s: Seconds | None = None
    reason: Annotated[str, AfterValidator(lambda text: shortened(" ".join(text.split()), MAX_REASON))] = ""
    until_tick: Annotated[int, Field(gt=0, lt=10**12, strict=True)] | None = None


def fusion_lines(sweep_dir: Path) -> list[str]:
    """Return a sentence for each stack of jobs, or for all that ran one by one for the same reason.

    Args:
        sweep_dir: the folder of a sweep; it may be a stranger's.

    Returns:
        At most MAX_LINES, and then how many are left out; none where no job shared a process.
    """
    lines = [_line(note) for note in _merged(_notes(sweep_dir))]
    left = len(lines) - MAX_LINES
    return lines if left <= 0 else [*lines[:MAX_LINES], f"{left} more such lines are left out: see {FOLDER}/*.json."]


def warning_lines(sweep_dir: Path) -> list[str]:
    """Return a sentence that says where warnings of jobs stand that shared a process; none where there are none.

    Args:
        sweep_dir: the folder of a sweep; it may be a stranger's.
    """
    counts: dict[str, int] = {}
    for name in _files(sweep_dir, ".log"):
        with suppress(RunFileError):
            counts[name] = sum(line.startswith(_WARNING) for line in (read_text(sweep_dir, name) or "").splitlines())
    places, count = [name for name in counts if counts[name]], sum(counts.values())
    return [f"{count} warning{'s' if count > 1 else ''} of runs: {_some(places)}"] if count else []


def _files(sweep_dir: Path, suffix: str) -> list[str]:
    try:
        return list_files(sweep_dir, FOLDER, suffix, MAX_FILES)
    except RunFileError:
        return []


def _notes(sweep_dir: Path) -> list[StackNote]:
    notes: list[StackNote] = []
    stacks = TypeAdapter(list[StackNote])
    for name in _files(sweep_dir, ".json"):
        with suppress(RunFileError, ValidationError):
            notes += stacks.validate_python((read_json(sweep_dir, name) or {}).get("stacks"))
    return sorted(notes[:MAX_STACKS], key=lambda note: note.jobs)


def _merged(notes: Iterable[StackNote]) -> Iterator[StackNote]:
    """Put those together that ran one by one for the same reason, of which nothing was measured."""
    alike: dict[object, list[StackNote]] = {}
    for place, note in enumerate(notes):
        is_plain = not note.is_fused and note.fused_s is note.alone_s is note.until_tick is None
        alike.setdefault(note.reason if is_plain else place, []).append(note)
    for group in alike.values():
        yield replace(group[0], jobs=tuple({job for note in group for job in note.jobs}))


def _line(note: StackNote) -> str:
    times, gain = "", ""
    if note.fused_s is not None and note.alone_s is not None:
        fused, alone = (f"{1e3 * seconds:.3g} ms" for seconds in (note.fused_s, note.alone_s))
        times = f"{fused} for the gradients of a tick, {alone} one by one"
        gain = f": {times} ({note.alone_s / note.fused_s:.1f} times)"
    who, reason = _named(note.jobs), f": {note.reason}" if note.reason else ""
    if note.is_fused:
        since = "" if note.until_tick is None else f", from tick {note.until_tick} on"
        return f"{who} ran as one program{gain}{f'; one by one in parts{since}{reason}' if reason else ''}"
    how = "by itself" if len(note.jobs) == 1 else "one by one"
    if note.until_tick is not None:
        return f"{who} ran as one program for {note.until_tick} ticks{gain}, and then {how}{reason}"
    return f"{who} ran {how}{reason}{f' ({times})' if times else ''}"


def _named(jobs: tuple[int, ...]) -> str:
    """Return the jobs in words.

    Example:
        >>> _named((0, 1, 2, 5, 6))
        'jobs 0 to 2, 5, 6'
    """
    parts: list[str] = []
    # Consecutive numbers are as far from their places as the first one is.
    for _, pairs in groupby(enumerate(jobs), key=lambda pair: pair[1] - pair[0]):
        run = [job for _, job in pairs]
        parts += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run)
    return f"job{'s' if len(jobs) > 1 else ''} {_some(parts)}"


def _some(parts: list[str]) -> str:
    rest = f" and {len(parts) - MAX_PARTS} more" if len(parts) > MAX_PARTS else ""
    return ", ".join(parts[:MAX_PARTS]) + rest
