"""What was found out about runs that share a process: read by the sweep's page, and by the sweep that goes on."""

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlotool.core.errors import WriteError
from mlotool.core.files import write_text, writing
from mlotool.fusion.comparison import Verdict
from mlotool.fusion.fused_ticks import StackRecord
from mlotool.fusion.stacked_schedule import Layout
from mlotool.runner.fusion_reading import read_record

_FIELDS = ("is_fused", "fused_s", "alone_s", "reason", "at_once", "since_tick")


class FusionRecord:
    """Keeps the record of a group of runs in a file.

    Args:
        path: of the file; None keeps none.
        jobs: by number of the run, that of its job.
    """

    def __init__(self, path: Path | None, jobs: Sequence[int]) -> None:
        self._path, self._jobs = path, list(jobs)
        self._stacks: dict[tuple[int, ...], StackRecord] = {}
        self._waves: list[list[int]] = []
        if path is not None and path.is_file():
            self._waves, stacks = read_record(path, self._jobs)
            self._stacks = {each.members: each for each in stacks}

    def stacks(self) -> list[StackRecord]:
        """Return what was found out before, by numbers of runs."""
        return list(self._stacks.values())

    def began_together(self, waiting: Sequence[int]) -> list[int]:
        """Return which of the runs that wait began together first, in an earlier process; none where none did."""
        found = [[number for number in wave if number in waiting] for wave in self._waves]
        return next((wave for wave in found if wave), [])

    def begin(self, members: Sequence[int]) -> None:
        """Write down which runs have begun together."""
        if [*members] not in self._waves:
            self._waves.append([*members])
        self.take([])

    def take(self, records: Sequence[StackRecord]) -> None:
        """Write down what has been found out."""
        self._stacks |= {each.members: each for each in records}
        if self._path is None:
            return
        known = [each for each in self._stacks.values() if each.reason or each.verdicts or each.layouts]
        waves = [[self._jobs[number] for number in wave] for wave in self._waves]
        content = {"jobs": self._jobs, "waves": waves, "stacks": [self._plain(each) for each in known]}
        try:
            with writing(self._path):
                self._path.parent.mkdir(exist_ok=True)
            write_text(self._path, json.dumps(content, indent=2) + "\n")
        except WriteError as error:
            # The runs themselves may still find room.
            warnings.warn(str(error), stacklevel=2)

    def note(self, members: Sequence[int], reason: str) -> None:
        """Write down why some runs are taken one by one."""
        self.take([StackRecord(tuple(members), reason=reason)])

    def _plain(self, record: StackRecord) -> dict[str, Any]:
        verdicts = list(record.verdicts.values())
        fused, alone = (_total(verdicts, name) for name in ("fused_s", "alone_s"))
        reasons = dict.fromkeys(filter(None, [record.reason, *[each.reason for each in verdicts]]))
        return {
            "jobs": [self._jobs[member] for member in record.members],
            "is_fused": any(each.is_fused for each in verdicts) and not record.reason,
            "until_tick": _until(record),
            "fused_s": fused,
            "alone_s": alone,
            "reason": "; ".join(reasons),
            "apart": {"reason": record.reason, "since_tick": record.since_tick},
            "layouts": [self._layout(lanes, each) for lanes, each in record.layouts.items()],
            "rounds": {name: _round(each) for name, each in record.verdicts.items()},
        }

    def _layout(self, lanes: Sequence[int], layout: Layout) -> dict[str, Any]:
        return {
            "jobs": [self._jobs[member] for member in lanes],
            "shares": layout.shares,
            "own_values": [*layout.own_values],
            "courses": {key: [*course] for key, course in layout.courses.items()},
        }


def _round(verdict: Verdict) -> dict[str, Any]:
    before = None if verdict.before is None else _round(verdict.before)
    return {**{key: getattr(verdict, key) for key in _FIELDS}, "before": before}


def _total(verdicts: Sequence[Verdict], name: str) -> float | None:
    found = [getattr(each, name) for each in verdicts if getattr(each, name) is not None]
    return sum(found) if found else None


def _until(record: StackRecord) -> int | None:
    """Return how many ticks members took as one program that have gone on one by one; None where they have not."""
    ends = [each.since_tick for each in record.verdicts.values() if each.before is not None and not each.is_fused]
    if record.reason and any(each.is_fused for each in record.verdicts.values()):
        ends.append(record.since_tick)
    return max(ends, default=None)
