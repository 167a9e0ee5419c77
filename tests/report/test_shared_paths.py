"""The paths of shared weights on the page of a run, and what a stranger's paths.json may do."""

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from mlotool.report import write_report
from mlotool.report.models import MAX_CANDIDATES, MAX_DECISIONS, read_paths
from mlotool.spaces import Operator, SharedSpace
from tests.report.html_check import read_page
from tests.report.model_nodes import node, write_nodes
from tests.report.run_folders import write_run

COUNTED = {"name": "kernel", "candidates": ["k3", "k5"], "counts": [1200, 300]}
CANDIDATES = {"k3": None, "k5": partial(nn.Conv2d, 1, 2, 5, padding=2)}
LEARNED = {"name": "kernel", "candidates": ["k3", "k5"], "probabilities": [0.25, 0.75], "found": "k5"}


def base() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU())


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


@pytest.mark.parametrize(
    ("counted", "learned"),
    [
        ([{**COUNTED, "counts": [1, "many"]}], []),
        ([{**COUNTED, "counts": [1]}], []),
        ([3], []),
        ([{"name": ["x"]}], []),
        ([COUNTED], [{**LEARNED, "probabilities": [0.5, "x"]}]),
    ],
)
def test_a_file_with_wrong_values_is_a_note(tmp_path: Path, counted: Any, learned: Any) -> None:
    spaces, [note] = read_paths(write_paths(tmp_path, counted, learned))
    assert spaces == {} and note.startswith("paths.json could not be read")


def test_sizes_are_bounded(tmp_path: Path) -> None:
    wide = {"candidates": [f"c{i}" for i in range(200)], "counts": [1] * 200}
    spaces, _ = read_paths(
        write_paths(
            tmp_path,
            [{"name": f"d{i}", **(wide if i < 9 else COUNTED | {"name": f"d{i}"})} for i in range(MAX_DECISIONS + 5)],
        )
    )
    assert len(spaces["classifier"]) == MAX_DECISIONS
    assert {len(each) for each in spaces["classifier"].values()} == {MAX_CANDIDATES, 2}


def test_the_super_graph_shows_the_shares_of_its_candidates_and_what_was_found(tmp_path: Path) -> None:
    """A run's page, of a shared space as the library describes it."""
    space = SharedSpace(base, [Operator("kernel", {"type": "Conv2d"}, CANDIDATES)], inputs=[1, 4, 4])
    nodes = [{**asdict(each)} for each in space.nodes]
    run = write_nodes(write_run(tmp_path / "run"), nodes, {"kernel_0": "k3"})
    counted, learned = ({**each, "name": "kernel_0"} for each in (COUNTED, LEARNED))
    page = read_page(write_report(write_paths(run, [counted], [learned])))
    assert "Conv2d k3 80% 0 ·" in page.text
    assert "Conv2d k5 ★ 20% 0@k5 ·" in page.text
    assert page.source.count('class="node changed found"') == 1
    assert "★ what the search has found" in page.text
    # None of them is taken: all are there at once.
    assert "decision among kernel_0 k3, k5" in page.text


def test_of_a_candidate_without_counts_the_mutator_is_shown(tmp_path: Path) -> None:
    made = [
        node("input", kind="placeholder"),
        {**node("a", "input", mutator="kernel"), "stands_for": [["kernel_0", "k3"]]},
    ]
    page = read_page(write_report(write_nodes(write_run(tmp_path / "run"), made, {"kernel_0": "k3"})))
    assert "Linear kernel a ·" in page.text
    assert "what the search has found" not in page.text
