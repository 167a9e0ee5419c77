"""The record of a group: what is read is what was written, and what is not as it was written is as good as none."""

import json
import random
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


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all values of nested containers."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *[found for key, each in inner for found in places(each, (*path, key))]]


def put(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    content[path[0]] = put(content[path[0]], path[1:], value)
    return content


WRONG: list[Any] = [None, True, -1, 10**400, 1e308, "x" * 100_000, "\x1b[2J", [], [[[]]], {}, {"jobs": [3]}, [3, 3], 99]
NEVER_READ = ("jobs", "is_fused", "until_tick", "fused_s", "alone_s", "reason")


def test_any_wrong_value_is_told_in_a_line_and_no_traceback(tmp_path: Path) -> None:
    """Each place of a record, with values of all kinds."""
    path, chance, num_told = tmp_path / "fusion" / "3.json", random.Random(0), 0
    content = written(path)
    for place in places(content):
        for wrong in chance.sample(WRONG, 5):
            path.write_text(json.dumps(put(json.loads(json.dumps(content)), place, wrong)))
            stacks, began, told = read(path)
            assert len(told) <= 1
            for text in told:
                num_told += 1
                assert text.startswith(str(path)) and "\n" not in text and len(text) < 1_000
                assert text.isprintable()
                assert "found out anew" in text
                assert (stacks, began) == ([], [])
            for each in stacks:
                # Nothing that the rest of the program could not take.
                assert {*each.members} <= {0, 1, 2, 3} and isinstance(each.reason, str)
                assert all(type(layout.shares) is dict for layout in each.layouts.values())
                for verdict in each.verdicts.values():
                    assert verdict.at(10**9) is verdict and verdict.at_once != 0
            is_summary = place[:1] == ("jobs",) or (len(place) > 2 and place[2] in NEVER_READ and place[2] != "jobs")
            assert not (told and is_summary)
    assert num_told > 300


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.7, 0.999])
def test_half_a_file(tmp_path: Path, share: float) -> None:
    path = tmp_path / "fusion" / "3.json"
    written(path)
    text = path.read_text()
    path.write_text(text[: int(share * len(text))])
    assert read(path)[:2] == ([], [])
    assert len(read(path)[2]) == 1


def test_what_is_no_file_of_ours(tmp_path: Path) -> None:
    path = tmp_path / "fusion" / "3.json"
    path.parent.mkdir()
    for content in (b"\xff\xfe\x00", b"[1, 2]", b"[" * 100_000, b'{"waves": ' + b"[" * 50_000, b"0" * 100_000):
        path.write_bytes(content)
        stacks, began, told = read(path)
        assert (stacks, began) == ([], []) and len(told) == 1
    path.unlink()
    path.symlink_to("/etc/passwd")
    assert read(path)[:2] == ([], [])


def test_jobs_of_another_group(tmp_path: Path) -> None:
    path = tmp_path / "fusion" / "3.json"
    content = written(path)
    content["stacks"][1]["jobs"] = [7, 9]
    path.write_text(json.dumps(content))
    stacks, began, [text] = read(path)
    assert (stacks, began) == ([], [])
    assert "found jobs [7, 9]; expected what an earlier process of these jobs wrote" in text


def test_a_chain_of_changes_without_an_end(tmp_path: Path) -> None:
    path = tmp_path / "fusion" / "3.json"
    text = json.dumps(written(path)["stacks"][1])
    chain = '{"before": ' * 500 + "1" + "}" * 500
    path.write_text('{"stacks": [' + text[:-1] + ', "rounds": {"a": ' + chain + "}}]}")
    stacks, _, told = read(path)
    assert not stacks and len(told) == 1
