"""What a sweep says of jobs that shared a process, whatever its files hold."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlotool.report.sweep_fusion import MAX_LINES, fusion_lines, warning_lines


def write(sweep: Path, content: Any, name: str = "0.json") -> list[str]:
    (sweep / "fusion").mkdir(exist_ok=True)
    (sweep / "fusion" / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return fusion_lines(sweep)


def stack(
    jobs: Any, is_fused: Any = False, fused_s: Any = None, alone_s: Any = None, reason: Any = ""
) -> dict[str, Any]:
    return {"jobs": jobs, "is_fused": is_fused, "fused_s": fused_s, "alone_s": alone_s, "reason": reason}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            stack(list(range(32)), True, 0.0091, 0.0190),
            "jobs 0 to 31 ran as one program: 9.1 ms for the gradients of a tick, 19 ms one by one (2.1 times)",
        ),
        (stack([4, 3], True), "jobs 3, 4 ran as one program"),
        (
            stack([3, 4], True, 0.002, 0.003, "problems.a: a custom step"),
            "jobs 3, 4 ran as one program: 2 ms for the gradients of a tick, 3 ms one by one (1.5 times); "
            "one by one in parts: problems.a: a custom step",
        ),
        (
            stack([0, 1, 2, 7], False, 0.02, 0.01, "one program of all takes longer"),
            "jobs 0 to 2, 7 ran one by one: one program of all takes longer "
            "(20 ms for the gradients of a tick, 10 ms one by one)",
        ),
        (
            stack([3], reason="no other\nis of its structure"),
            "job 3 ran by itself: no other is of its structure",
        ),
        (stack([3, 4]), "jobs 3, 4 ran one by one"),
    ],
)
def test_a_stack_is_a_sentence(given: dict[str, Any], expected: str, tmp_path: Path) -> None:
    assert write(tmp_path, {"jobs": [0], "stacks": [given]}) == [expected]


def test_stacks_of_all_groups_are_in_the_order_of_their_jobs(tmp_path: Path) -> None:
    """Those of one reason together, where nothing was measured."""
    write(tmp_path, {"stacks": [stack([40, 41], True), stack([38], reason="a"), stack([39], reason="b")]}, "32.json")
    found = write(tmp_path, {"stacks": [stack([3, 5], True), stack([4], reason="a"), stack([6, 7], False, 2, 1, "a")]})
    assert found == [
        "jobs 3, 5 ran as one program",
        "jobs 4, 38 ran one by one: a",
        "jobs 6, 7 ran one by one: a (2e+03 ms for the gradients of a tick, 1e+03 ms one by one)",
        "job 39 ran by itself: b",
        "jobs 40, 41 ran as one program",
    ]


def test_there_is_an_end(tmp_path: Path) -> None:
    stacks = [stack(list(range(place, 100_000, 2)), True, reason="x" * 10_000) for place in range(3)]
    stacks += [stack([place, place + 1], True) for place in range(3_000)]
    found = write(tmp_path, {"stacks": stacks})
    assert len(found) == MAX_LINES + 1
    assert found[-1] == f"{3_003 - MAX_LINES} more such lines are left out: see fusion/*.json."
    assert max(map(len, found)) < 600


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{", {"stacks": 3}, {"stacks": [3]}, {"stacks": [stack([-1])]}, '{"stacks": [' + "1" * 3_000_000],
)
def test_what_is_no_record_says_nothing(content: Any, tmp_path: Path) -> None:
    assert write(tmp_path, content) == []


def test_where_warnings_of_runs_stand(tmp_path: Path) -> None:
    assert warning_lines(tmp_path) == []
    write(tmp_path, {"stacks": []})
    assert warning_lines(tmp_path) == []
    (tmp_path / "fusion" / "0.log").write_text("mlotool: warning: a\nmlotool: job 1 failed: b\nmlotool: warning: c\n")
    (tmp_path / "fusion" / "4.log").write_text("mlotool: going on\n")
    assert warning_lines(tmp_path) == ["2 warnings of runs: fusion/0.log"]
    (tmp_path / "fusion" / "4.log").write_text("mlotool: warning: d\n")
    assert warning_lines(tmp_path) == ["3 warnings of runs: fusion/0.log, fusion/4.log"]
    (tmp_path / "fusion" / "0.log").unlink()
    assert warning_lines(tmp_path) == ["1 warning of runs: fusion/4.log"]


def test_a_verdict_that_has_changed_says_since_when(tmp_path: Path) -> None:
    given = {**stack([0, 1], False, 0.001, 0.002, "a counter"), "until_tick": 40}
    times = "1 ms for the gradients of a tick, 2 ms one by one (2.0 times)"
    assert write(tmp_path, {"stacks": [given]}) == [
        f"jobs 0, 1 ran as one program for 40 ticks: {times}, and then one by one: a counter"
    ]
    given = {**stack([0, 1], True, None, None, "a counter"), "until_tick": 40}
    assert write(tmp_path, {"stacks": [given]}) == [
        "jobs 0, 1 ran as one program; one by one in parts, from tick 40 on: a counter"
    ]
