"""The record of a group: what is read is what was written, and what is not as it was written is as good as none."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from mlotool.fusion.comparison import Verdict
from mlotool.fusion.fused_ticks import StackRecord
from mlotool.fusion.stacked_schedule import Layout
from mlotool.runner.together import FusionRecord

JOBS = [3, 4, 7, 8]
FIRST = Verdict(is_fused=True, fused_s=0.5, alone_s=1.0, since_tick=1)
CHANGED = FIRST.changed(40, at_once=2).changed(90, is_fused=False, reason="a counter")
LAYOUT = Layout({"a": True, "b": False}, ("problems.a.loss.t",), {"a:0f": (True, False)})
RECORDS = [
    StackRecord((0, 1), {"a": CHANGED, "b+c": FIRST}, "", 0, {(0, 1): LAYOUT}),
    StackRecord((2, 3), {"a": FIRST}, "a shape has changed", 60, {(2, 3): Layout(), (3, 2): LAYOUT}),
]


def written(path: Path) -> dict[str, Any]:
    book = FusionRecord(path, JOBS)
    book.begin([0, 1])
    book.begin([2, 3])
    book.take(RECORDS)
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def read(path: Path) -> tuple[list[StackRecord], list[int], list[str]]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        book = FusionRecord(path, JOBS)
    return book.stacks(), book.began_together([1, 2, 3]), [str(each.message) for each in told]


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "fusion" / "3.json"
    content = written(path)
    assert read(path) == (RECORDS, [1], [])
    assert [each["jobs"] for each in content["stacks"]] == [[3, 4], [7, 8]]
    assert [each["until_tick"] for each in content["stacks"]] == [90, 60]
    assert [each["is_fused"] for each in content["stacks"]] == [True, False]
    assert content["stacks"][0]["reason"] == "a counter"


def test_unknown_keys_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "fusion" / "3.json"
    content = written(path)
    content["new"] = content["stacks"][0]["new"] = content["stacks"][0]["rounds"]["a"]["new"] = 1
    path.write_text(json.dumps(content))
    assert read(path) == (RECORDS, [1], [])


def test_jobs_of_another_group(tmp_path: Path) -> None:
    path = tmp_path / "fusion" / "3.json"
    content = written(path)
    content["stacks"][1]["jobs"] = [7, 9]
    path.write_text(json.dumps(content))
    stacks, began, [text] = read(path)
    assert (stacks, began) == ([], [])
    assert "found jobs [7, 9]; expected what an earlier process of these jobs wrote" in text


@pytest.mark.parametrize("content", ['{"stacks": [{"jobs"', '{"stacks": [{"jobs": 3}]}', "[" * 100_000])
def test_what_is_no_record_is_as_good_as_none(tmp_path: Path, content: str) -> None:
    path = tmp_path / "3.json"
    path.write_text(content)
    stacks, began, [text] = read(path)
    assert (stacks, began) == ([], []) and "found out anew" in text
