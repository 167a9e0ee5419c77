"""What a sweep's folder says of jobs that shared a process: which ran as one program, and what that gained."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlotool.core.errors import RunFileError
from mlotool.core.run_files import list_files, read_json, read_text
from mlotool.report.formats import shortened

FOLDER = "fusion"
MAX_FILES, MAX_STACKS, MAX_LINES = 2_000, 20_000, 12
MAX_REASON, MAX_PARTS = 300, 12
_WARNING = "mlotool: warning: "
# Of one tick: what is beside them is no measurement.
LEAST_SECONDS, MOST_SECONDS = 1e-9, 1e5


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

    jobs: tuple[int, ...]
    is_fused: bool
    fused_s: float | None
    alone_s: float | None
    reason: str
    until_tick: int | None = None


def fusion_lines(sweep_dir: Path) -> list[str]:
    """Return a sentence for each stack of jobs, or for all that ran one by one for the same reason.

    Args:
        sweep_dir: the folder of a sweep; it may be a stranger's.

    Returns:
        At most MAX_LINES, and then how many are left out; none where no job shared a process.
    """
    lines = [_line(each) for each in _merged(_notes(sweep_dir))]
    left = len(lines) - MAX_LINES
    return lines if left <= 0 else [*lines[:MAX_LINES], f"{left} more such lines are left out: see {FOLDER}/*.json."]


def warning_lines(sweep_dir: Path) -> list[str]:
    """Return a sentence that says where warnings of jobs stand that shared a process; none where there are none.

    Args:
        sweep_dir: the folder of a sweep; it may be a stranger's.
    """
    found: dict[str, int] = {}
    try:
        names = list_files(sweep_dir, FOLDER, ".log", MAX_FILES)
    except RunFileError:
        return []
    for name in names:
        try:
            lines = (read_text(sweep_dir, name) or "").splitlines()
        except RunFileError:
            continue
        found[name] = sum(line.startswith(_WARNING) for line in lines)
    places = [name for name, count in found.items() if count]
    count = sum(found.values())
    if not count:
        return []
    rest = f" and {len(places) - MAX_PARTS} more" if len(places) > MAX_PARTS else ""
    return [f"{count} warning{'s' if count > 1 else ''} of runs: {', '.join(places[:MAX_PARTS])}{rest}"]


def _notes(sweep_dir: Path) -> list[StackNote]:
    try:
        names = list_files(sweep_dir, FOLDER, ".json", MAX_FILES)
    except RunFileError:
        return []
    found: list[StackNote] = []
    for name in names:
        try:
            stacks = (read_json(sweep_dir, name) or {}).get("stacks")
        except RunFileError:
            continue
        for stack in stacks if isinstance(stacks, list) else []:
            note = _note(stack)
            if note is not None and len(found) < MAX_STACKS:
                found.append(note)
    return sorted(found, key=lambda note: note.jobs)


def _note(stack: Any) -> StackNote | None:
    if not isinstance(stack, Mapping):
        return None
    jobs, reason = stack.get("jobs"), stack.get("reason")
    if not isinstance(jobs, list) or not jobs or not all(type(job) is int and 0 <= job < 10**9 for job in jobs):
        return None
    text = " ".join(reason.split()) if isinstance(reason, str) else ""
    until = stack.get("until_tick")
    return StackNote(
        tuple(sorted(set(jobs))),
        stack.get("is_fused") is True,
        _seconds(stack.get("fused_s")),
        _seconds(stack.get("alone_s")),
        shortened(text, MAX_REASON),
        until if type(until) is int and 0 < until < 10**12 else None,
    )


def _seconds(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if LEAST_SECONDS < value < MOST_SECONDS else None


def _merged(notes: Iterable[StackNote]) -> Iterator[StackNote]:
    """Put those together that ran one by one for the same reason, of which nothing was measured."""
    alike: dict[object, list[StackNote]] = {}
    for place, note in enumerate(notes):
        is_measured = note.fused_s is not None or note.alone_s is not None
        is_own = note.is_fused or is_measured or note.until_tick is not None
        alike.setdefault(place if is_own else note.reason, []).append(note)
    for first, *others in alike.values():
        jobs = {*first.jobs}.union(*(each.jobs for each in others))
        yield replace(first, jobs=tuple(sorted(jobs)))


def _line(note: StackNote) -> str:
    times, gain = "", ""
    if note.fused_s is not None and note.alone_s is not None:
        times = f"{_milliseconds(note.fused_s)} for the gradients of a tick, {_milliseconds(note.alone_s)} one by one"
        gain = f": {times} ({note.alone_s / note.fused_s:.1f} times)"
    if note.is_fused:
        since = "" if note.until_tick is None else f", from tick {note.until_tick} on"
        rest = f"; one by one in parts{since}: {note.reason}" if note.reason else ""
        return f"{_named(note.jobs)} ran as one program{gain}{rest}"
    how = "by itself" if len(note.jobs) == 1 else "one by one"
    reason = f": {note.reason}" if note.reason else ""
    if note.until_tick is not None:
        return f"{_named(note.jobs)} ran as one program for {note.until_tick} ticks{gain}, and then {how}{reason}"
    return f"{_named(note.jobs)} ran {how}{reason}{f' ({times})' if times else ''}"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _named(jobs: tuple[int, ...]) -> str:
    """Return the jobs in words.

    Example:
        >>> _named((0, 1, 2, 5, 6))
        'jobs 0 to 2, 5, 6'
    """
    runs: list[list[int]] = []
    for job in jobs:
        if runs and job == runs[-1][-1] + 1:
            runs[-1].append(job)
        else:
            runs.append([job])
    parts = [part for run in runs for part in ([f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run))]
    shown = ", ".join(parts[:MAX_PARTS]) + (f" and {len(parts) - MAX_PARTS} more" if len(parts) > MAX_PARTS else "")
    return f"job{'s' if len(jobs) > 1 else ''} {shown}"
