"""Models of spaces on the page of a run: graph, paths of shared weights, and what a stranger's files may do."""

import itertools
import json
import re
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from mlotool.folders.run_folder import RunFolder
from mlotool.report import models as reading
from mlotool.report import write_report
from mlotool.report.graph import Arrangement, arrange, model_section, problem_graph
from mlotool.report.models import TIMES, ModelNode, model_boxes, read_models, read_paths
from mlotool.spaces import Operator, SharedSpace
from tests.report.html_check import Page, read_page
from tests.report.run_folders import cells, mwn_config, node, problem, residual, write_nodes, write_run

COUNTED = {"name": "kernel_0", "candidates": ["k3", "k5"], "counts": [1200, 300]}
LEARNED = {"name": "kernel_0", "candidates": ["k3", "k5"], "probabilities": [0.25, 0.75], "found": "k5"}


def page_of(folder: Path) -> Page:
    return read_page(write_report(folder))


def nodes_of(folder: Path, nodes: list[Any]) -> tuple[ModelNode, ...]:
    [record], notes = read_models(RunFolder(write_nodes(folder, nodes)))
    assert notes == []
    return record.nodes


def sizes(folder: Path, nodes: list[Any]) -> list[int]:
    return [len(box.nodes) for box in model_boxes(nodes_of(folder, nodes))]


def write_paths(folder: Path, counted: Any, learned: Any = ()) -> Path:
    content = {"spaces": {"classifier": counted}, "architectures": {"architecture": learned}}
    (folder / "paths.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", rows=[])


def test_a_run_shows_its_model(run: Path) -> None:
    page = page_of(run)
    assert "<h2>Model</h2>" not in page.source and "Paths of the shared weights" not in page.text
    decisions = {"kernel_0": "k3", "kernel_1": "k5", "kernel_2": "k3", "kernel_3": "k3", "depth": "k3"}
    page = page_of(write_nodes(run, residual(4, [1]), decisions))
    assert "classifier: 19,074 parameters, 19 nodes, 1 of them changed" in page.text
    assert page.source.count('class="node changed"') == 1
    assert f"Conv2d kernel blocks.1.convolution · 16{TIMES}8{TIMES}8" in page.text
    assert "5 decisions of classifier" in page.text
    assert "kernel_1 k5 k3, k5 kernel_2 .. kernel_3 (2) k3 k3, k5" in page.text
    many = {f"kernel_{number}": "k5" if number % 2 else "k3" for number in range(100)}
    assert "<summary>100 decisions of classifier</summary>" in page_of(write_nodes(run, [], many)).source


def test_what_is_unchanged_is_one_box_and_a_changed_block_is_opened(tmp_path: Path) -> None:
    assert sizes(tmp_path, residual(50)) == [203]
    # The stem and a block before; convolution, norm, sum of the changed one; the rest.
    assert sizes(tmp_path, residual(9, [4])) == [18, 1, 1, 1, 18]
    # Parameters that are read are no boxes.
    assert sizes(tmp_path, [node("x"), node("s", kind="get_attr"), node("y", "x", "s", mutator="m")]) == [1, 1]
    # What is too tangled is one box.
    tangle = [node(f"l{i}", *(f"l{j}" for j in range(i)), mutator="m") for i in range(40)]
    assert sizes(tmp_path, tangle)[-1] > 10


@pytest.mark.parametrize("nodes", [residual(3, [1]), cells(6)], ids=["one block", "cells"])
def test_boxes_do_not_touch(tmp_path: Path, nodes: list[Any]) -> None:
    boxes = model_boxes(nodes_of(tmp_path, nodes))
    assert sorted(one.id for box in boxes for one in box.nodes) == sorted(one["id"] for one in nodes)
    edges = [(source, number) for number, box in enumerate(boxes) for source in box.inputs]
    arrangement: Arrangement = arrange(dict.fromkeys(range(len(boxes)), 120.0), edges, 16.0, 8.0)
    for one, other in itertools.combinations(range(len(boxes)), 2):
        assert arrangement.row[one] != arrangement.row[other] or abs(arrangement.x[one] - arrangement.x[other]) >= 120.0
    assert all(arrangement.row[upper] < arrangement.row[lower] for upper, lower in edges)


def test_strange_files_are_a_note(run: Path) -> None:
    (run / "nodes.json").write_text('{"problems": {"a": {"nodes": {"id": "x"}, "num_parameters": "many"}}}')
    models, [note] = read_models(RunFolder(run))
    assert models == [] and note.startswith("nodes.json could not be read")
    assert note in page_of(run).text
    for counted, learned in (
        ([{**COUNTED, "counts": [1]}], []),
        ([COUNTED], [{**LEARNED, "probabilities": [0.5, "x"]}]),
    ):
        spaces, [note] = read_paths(RunFolder(write_paths(run, counted, learned)))
        assert spaces == {} and note.startswith("paths.json could not be read")


def test_a_node_reads_nodes_before_it_alone(tmp_path: Path) -> None:
    nodes = nodes_of(tmp_path, [node("a", "b"), node("b", "a", "b"), node("a", "a")])
    assert [(one.id, one.inputs) for one in nodes] == [("a", ()), ("b", ("a",))]


@pytest.mark.parametrize("nodes", [cells(150), [node("x" * 100_000 + str(i), mutator="y" * 1_000) for i in range(15)]])
def test_huge_graphs_are_bounded(tmp_path: Path, nodes: list[Any]) -> None:
    [record], _ = read_models(RunFolder(write_nodes(tmp_path, nodes)))
    assert len(record.nodes) <= reading.MAX_NODES and 0 < len(model_section(record)) < 2_000_000


def test_paths_of_shared_weights_are_shown_with_what_was_found(run: Path) -> None:
    page = page_of(write_paths(run, [COUNTED]))
    assert "kernel_0 k3 1,200 k5 300" in page.text
    assert "★ is what" not in page.text and "probability" not in page.text
    page = page_of(write_paths(run, [COUNTED], [LEARNED]))
    assert "classifier: how often each candidate was trained; ★ is what the search has found" in page.text
    assert "kernel_0 k3 1,200 0.25 k5 ★ 300 0.75" in page.text and "width:25.0%" in page.source


def test_sizes_of_paths_are_bounded(tmp_path: Path) -> None:
    wide = {"candidates": [f"c{i}" for i in range(200)], "counts": [1] * 200}
    some = [
        {"name": f"d{i}", **(wide if i < 9 else COUNTED | {"name": f"d{i}"})} for i in range(reading.MAX_DECISIONS + 5)
    ]
    spaces, _ = read_paths(RunFolder(write_paths(tmp_path, some)))
    assert len(spaces["classifier"]) == reading.MAX_DECISIONS
    assert {len(candidates) for candidates in spaces["classifier"].values()} == {reading.MAX_CANDIDATES, 2}


def test_the_super_graph_shows_the_shares_of_its_candidates_and_what_was_found(run: Path) -> None:
    """A run's page, of a shared space as the library describes it."""
    base = partial(nn.Sequential, nn.Conv2d(1, 2, 3, padding=1), nn.ReLU())
    candidates = {"k3": None, "k5": partial(nn.Conv2d, 1, 2, 5, padding=2)}
    space = SharedSpace(base, [Operator("kernel", {"type": "Conv2d"}, candidates)], inputs=[1, 4, 4])
    write_nodes(run, [asdict(one) for one in space.nodes], {"kernel_0": "k3"})
    page = page_of(write_paths(run, [COUNTED], [LEARNED]))
    assert re.search(r"Conv2d k3 80% 0 ·.* Conv2d k5 ★ 20% 0@k5 ·", page.text)
    assert page.source.count('class="node changed found"') == 1
    # None of them is taken: all are there at once.
    assert "decision among kernel_0 k3, k5" in page.text


WIDTH = 200.0


def lay_out(problems: str, edges: str) -> Arrangement:
    """Lay out problems of one letter; edges are of an upper and a lower one."""
    return arrange(dict.fromkeys(problems, WIDTH), [(upper, lower) for upper, lower in edges.split()], 44.0, 30.0)


def test_edges_do_not_cross_boxes_or_each_other() -> None:
    arrangement = lay_out("uml", "ul um ml")
    assert [arrangement.row[problem] for problem in "uml"] == [0, 1, 2]
    _, lane, _ = arrangement.chains["u", "l"]
    assert abs(arrangement.x[lane] - arrangement.x["m"]) > WIDTH / 2
    arrangement = lay_out("tabcdl", "ta tb ad bc dl cl")
    assert (arrangement.x["a"] < arrangement.x["b"]) == (arrangement.x["d"] < arrangement.x["c"])
    # A cycle still gives a picture.
    assert set(lay_out("ab", "ab ba").row) == {"a", "b"}


def test_each_problem_may_have_a_hypergradient_of_its_own() -> None:
    config = mwn_config()
    own = {"_target_": "mlotool.hypergradient.FirstOrder"}
    config["problems"]["classifier"] = problem("MLP", 0.1, hypergradient=own)
    picture = problem_graph(config, {"reweight": "problem-0", "classifier": "problem-1"})
    assert picture is not None and "first order" in picture and "identity" not in picture
    assert picture.count("stroke-dasharray") == 1
