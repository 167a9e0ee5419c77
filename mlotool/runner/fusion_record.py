"""What was found out about runs that share a process: read by the sweep's page, and by the sweep that goes on."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlotool.core.errors import RunFileError
from mlotool.core.files import write_text, writing
from mlotool.core.run_files import read_json
from mlotool.fusion.fused_ticks import StackRecord
from mlotool.fusion.stacked_rounds import Verdict


class FusionRecord:
    """Keeps the record of a group of runs in a file.

    Args:
        path: of the file; None keeps none.
        jobs: by number of the run, that of its job.
    """

    def __init__(self, path: Path | None, jobs: Sequence[int]) -> None:
        self._path, self._jobs = path, list(jobs)
        self._stacks: dict[tuple[int, ...], StackRecord] = {}
        if path is not None and path.is_file():
            for each in _read(path, self._jobs):
                self._stacks[each.members] = each

    def stacks(self) -> list[StackRecord]:
        """Return what was found out before, by numbers of runs."""
        return list(self._stacks.values())

    def take(self, records: Sequence[StackRecord]) -> None:
        """Write down what has been found out."""
        self._stacks |= {each.members: each for each in records}
        if self._path is None:
            return
        known = [each for each in self._stacks.values() if each.reason or each.verdicts]
        content = {"jobs": self._jobs, "stacks": [self._plain(each) for each in known]}
        with writing(self._path):
            self._path.parent.mkdir(exist_ok=True)
        write_text(self._path, json.dumps(content, indent=2) + "\n")

    def note(self, members: Sequence[int], reason: str) -> None:
        """Write down why some runs are taken one by one."""
        self.take([StackRecord(tuple(members), reason=reason)])

    def _plain(self, record: StackRecord) -> dict[str, Any]:
        verdicts = list(record.verdicts.values())
        fused, alone = (_total(verdicts, name) for name in ("fused_s", "alone_s"))
        reasons = dict.fromkeys(filter(None, [record.reason, *[each.reason for each in verdicts]]))
        return {
            "jobs": [self._jobs[member] for member in record.members],
            "is_fused": any(each.is_fused for each in verdicts),
            "fused_s": fused,
            "alone_s": alone,
            "reason": "; ".join(reasons),
            "rounds": {
                name: {key: getattr(each, key) for key in ("is_fused", "fused_s", "alone_s", "reason", "at_once")}
                for name, each in record.verdicts.items()
            },
        }


def _total(verdicts: Sequence[Verdict], name: str) -> float | None:
    found = [getattr(each, name) for each in verdicts if getattr(each, name) is not None]
    return sum(found) if found else None


def _read(path: Path, jobs: Sequence[int]) -> list[StackRecord]:
    """Return the stacks of a file, which may be anybody's; what is not as it is written is left out."""
    try:
        content = read_json(path.parent, path.name) or {}
    except RunFileError:
        return []
    numbers = {job: number for number, job in enumerate(jobs)}
    found = []
    stacks = content.get("stacks")
    for each in stacks if isinstance(stacks, list) else []:
        members = each.get("jobs") if isinstance(each, Mapping) else None
        rounds = each.get("rounds") if isinstance(each, Mapping) else None
        if not isinstance(members, list) or not isinstance(rounds, Mapping):
            continue
        if not all(isinstance(job, int) and job in numbers for job in members):
            continue
        verdicts = {str(name): _verdict(value) for name, value in rounds.items() if isinstance(value, Mapping)}
        reason = "" if verdicts else str(each.get("reason") or "")
        found.append(StackRecord(tuple(numbers[job] for job in members), verdicts, reason))
    return found


def _verdict(value: Mapping[str, Any]) -> Verdict:
    reason = str(value.get("reason") or "")
    at_once = value.get("at_once")
    is_count = isinstance(at_once, int) and not isinstance(at_once, bool) and at_once > 0
    return Verdict(
        value.get("is_fused") is True,
        _seconds(value, "fused_s"),
        _seconds(value, "alone_s"),
        reason,
        at_once if is_count else None,
    )


def _seconds(value: Mapping[str, Any], name: str) -> float | None:
    found = value.get(name)
    if isinstance(found, bool) or not isinstance(found, int | float):
        return None
    return float(found) if math.isfinite(found) else None
