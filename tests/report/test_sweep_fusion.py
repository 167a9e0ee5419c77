"""What a sweep says of jobs that shared a process, whatever its files hold."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlotool.report.sweep import MAX_LINES, fusion_lines, warning_lines


def write(sweep: Path, content: Any, name: str = "0.json") -> list[str]:
    (sweep / "fusion").mkdir(exist_ok=True)
    (sweep / "fusion" / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return fusion_lines(sweep)


def stack(jobs: Any, is_fused: Any = False, fused_s: Any = None, alone_s: Any = None, reason: Any = "") -> Any:
    return {"jobs": jobs, "is_fused": is_fused, "fused_s": fused_s, "alone_s": alone_s, "reason": reason}


def test_a_stack_is_a_sentence_and_those_of_one_reason_are_together(tmp_path: Path) -> None:
    write(tmp_path, {"stacks": [stack([40, 41], True), stack([38], reason="a\nb"), stack([39], reason="c")]}, "32.json")
    slow = {**stack([6, 7], True, 0.02, 0.01, "a counter"), "until_tick": 40}
    assert write(tmp_path, {"stacks": [stack([0, 1, 2, 5], True, 0.01, 0.019), stack([4], reason="a b"), slow]}) == [
        "jobs 0 to 2, 5 ran as one program (10 ms for the gradients of a tick as one, 19 ms one by one: 1.9 times as "
        "fast)",
        "jobs 4, 38 ran one by one; a b",
        "jobs 6, 7 ran as one program until tick 40, and then one by one in parts (20 ms for the gradients of a tick "
        "as one, 10 ms one by one: 0.5 times as fast); in parts one by one: a counter",
        "job 39 ran one by one; c",
        "jobs 40, 41 ran as one program",
    ]


def test_there_is_an_end(tmp_path: Path) -> None:
    stacks = [stack(list(range(place, 100_000, 2)), True, reason="x" * 10_000) for place in range(3)]
    stacks += [stack([place, place + 1], True) for place in range(3_000)]
    lines = write(tmp_path, {"stacks": stacks})
    assert len(lines) == MAX_LINES + 1
    assert lines[-1] == f"{3_003 - MAX_LINES} more such lines are left out: see fusion/*.json."
    assert max(map(len, lines)) < 600


@pytest.mark.parametrize("content", ["", "[]", {"stacks": 3}, {"stacks": [3]}, {"stacks": [stack([-1])]}])
def test_what_is_no_record_says_nothing(content: Any, tmp_path: Path) -> None:
    assert write(tmp_path, content) == []


def test_where_warnings_of_runs_stand(tmp_path: Path) -> None:
    write(tmp_path, {"stacks": []})
    assert warning_lines(tmp_path) == []
    for name, text in (("0", "mlotool: warning: a\n"), ("4", "mlotool: going on\n"), ("8", "mlotool: warning: d\n")):
        (tmp_path / "fusion" / f"{name}.log").write_text(text)
    assert warning_lines(tmp_path) == ["warnings of runs: fusion/0.log, fusion/8.log"]
