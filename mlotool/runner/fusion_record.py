"""What was found out about runs that share a process: read by the sweep's page, and by the sweep that goes on."""

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlotool.core.errors import RunFileError, WriteError
from mlotool.core.files import write_text, writing
from mlotool.core.run_files import read_json
from mlotool.fusion.fused_ticks import StackRecord
from mlotool.fusion.verdict import Verdict


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
            content = _content(path)
            self._waves = _waves(content, self._jobs)
            for each in _stacks(content, self._jobs):
                self._stacks[each.members] = each

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
        known = [each for each in self._stacks.values() if each.reason or each.verdicts]
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
            "is_fused": any(each.is_fused for each in verdicts),
            "fused_s": fused,
            "alone_s": alone,
            "reason": "; ".join(reasons),
            "shares": [
                {"jobs": [self._jobs[member] for member in lanes], "problems": shares}
                for lanes, shares in record.shares.items()
            ],
            "rounds": {
                name: {key: getattr(each, key) for key in ("is_fused", "fused_s", "alone_s", "reason", "at_once")}
                for name, each in record.verdicts.items()
            },
        }


def _total(verdicts: Sequence[Verdict], name: str) -> float | None:
    found = [getattr(each, name) for each in verdicts if getattr(each, name) is not None]
    return sum(found) if found else None


def _content(path: Path) -> Mapping[str, Any]:
    """Return what a file holds, which may be anybody's."""
    try:
        return read_json(path.parent, path.name) or {}
    except RunFileError:
        return {}


def _waves(content: Mapping[str, Any], jobs: Sequence[int]) -> list[list[int]]:
    """Return the runs that began together, if all of it is as it was written."""
    waves = content.get("waves")
    found = [_numbers(each, jobs) for each in waves] if isinstance(waves, list) else []
    whole = [each for each in found if each]
    every = [number for each in whole for number in each]
    return whole if len(set(every)) == len(every) else []


def _stacks(content: Mapping[str, Any], jobs: Sequence[int]) -> list[StackRecord]:
    """Return the stacks; what is not as it was written is left out."""
    stacks, found = content.get("stacks"), []
    for each in stacks if isinstance(stacks, list) else []:
        if not isinstance(each, Mapping) or not isinstance(rounds := each.get("rounds"), Mapping):
            continue
        if not (members := _numbers(each.get("jobs"), jobs)):
            continue
        verdicts = {str(name): _verdict(value) for name, value in rounds.items() if isinstance(value, Mapping)}
        reason = "" if verdicts else str(each.get("reason") or "")
        found.append(StackRecord(tuple(members), verdicts, reason, _shares(each.get("shares"), jobs)))
    return found


def _shares(value: Any, jobs: Sequence[int]) -> dict[tuple[int, ...], dict[str, bool]]:
    found = {}
    for each in value if isinstance(value, list) else []:
        if isinstance(each, Mapping) and isinstance(problems := each.get("problems"), Mapping):
            found[tuple(_numbers(each.get("jobs"), jobs))] = {
                str(name): flag is True for name, flag in problems.items()
            }
    return found


def _numbers(value: Any, jobs: Sequence[int]) -> list[int]:
    """Return the numbers of the runs of jobs; none where one of them is none."""
    if not isinstance(value, list) or not all(isinstance(job, int) and job in jobs for job in value):
        return []
    return [jobs.index(job) for job in value]


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
