"""The paths of shared weights on the page of a run, and what a stranger's paths.json may do."""

import json
from pathlib import Path
from typing import Any

from mlotool.report import write_report
from mlotool.report.shared_paths import MAX_CANDIDATES, MAX_DECISIONS, TrainedCandidate, read_paths
from tests.report.html_check import read_page
from tests.report.run_folders import write_run

COUNTED = {"name": "kernel", "candidates": ["k3", "k5"], "counts": [1200, 300]}
LEARNED = {"name": "kernel", "candidates": ["k3", "k5"], "probabilities": [0.25, 0.75], "found": "k5"}


def write_paths(folder: Path, counted: Any, learned: Any = ()) -> Path:
    folder.mkdir(exist_ok=True)
    content = {"spaces": {"classifier": counted}, "architectures": {"architecture": learned}}
    (folder / "paths.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def test_counts_and_what_was_found_are_shown(tmp_path: Path) -> None:
    page = read_page(write_report(write_paths(write_run(tmp_path / "run"), [COUNTED], [LEARNED])))
    assert "classifier: how often each candidate was trained; ★ is what the search has found" in page.text
    assert "kernel k3 1,200 0.25 k5 ★ 300 0.75" in page.text
    assert "width:25.0%" in page.source


def test_without_an_architecture_nothing_is_found(tmp_path: Path) -> None:
    page = read_page(write_report(write_paths(write_run(tmp_path / "run"), [COUNTED])))
    assert "kernel k3 1,200 k5 300" in page.text
    assert "★ is what" not in page.text and "probability" not in page.text


def test_a_run_without_shared_weights_has_no_such_section(tmp_path: Path) -> None:
    assert "Paths of the shared weights" not in read_page(write_report(write_run(tmp_path / "run"))).text


def test_a_strangers_text_is_no_markup(tmp_path: Path) -> None:
    evil = {"name": "<script>a</script>", "candidates": ["<img src=x>"], "counts": [1]}
    page = read_page(write_report(write_paths(write_run(tmp_path / "run"), [evil])))
    assert "<img src=x>" not in page.source and "<script>a" not in page.source
    assert "<img src=x>" in page.text


def test_wrong_values_are_left_out(tmp_path: Path) -> None:
    wrong = {**COUNTED, "counts": [-1, "many"]}
    learned = {**LEARNED, "probabilities": [7, True], "found": ["k5"]}
    spaces, notes = read_paths(write_paths(tmp_path, [wrong, 3, {"name": ["x"]}], [learned]))
    expected = [TrainedCandidate("k3", 0, None, False), TrainedCandidate("k5", 0, None, False)]
    assert (spaces, notes) == ({"classifier": {"kernel": expected}}, [])


def test_sizes_are_bounded(tmp_path: Path) -> None:
    wide = {"candidates": [f"c{i}" for i in range(200)], "counts": [1] * 200}
    spaces, _ = read_paths(write_paths(tmp_path, [{"name": f"d{i}", **wide} for i in range(MAX_DECISIONS + 5)]))
    assert len(spaces["classifier"]) == MAX_DECISIONS
    assert {len(each) for each in spaces["classifier"].values()} == {MAX_CANDIDATES}


def test_a_broken_file_is_a_note(tmp_path: Path) -> None:
    (tmp_path / "paths.json").write_text("{", encoding="utf-8")
    spaces, [note] = read_paths(tmp_path)
    assert spaces == {} and note.startswith("paths.json could not be read")
