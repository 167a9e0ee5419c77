"""A model's graph on the page of a run: what is a box, where it stands, and what a stranger's nodes.json may do."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from mlotool.report import write_report
from mlotool.report.graph import NODE_HEIGHT, model_part, model_section
from mlotool.report.models import MAX_NODES, TIMES, ModelNode, model_parts, read_models
from tests.report.html_check import Page, read_page
from tests.report.model_nodes import cells, node, residual, write_nodes
from tests.report.run_folders import write_run


def page_of(folder: Path) -> Page:
    return read_page(write_report(folder))


def nodes_of(folder: Path, nodes: list[Any]) -> tuple[ModelNode, ...]:
    [record], notes = read_models(write_nodes(folder, nodes))
    assert notes == []
    return record.nodes


def sizes(folder: Path, nodes: list[Any]) -> list[list[int]]:
    return [[len(box.nodes) for box in part.values()] for part in model_parts(nodes_of(folder, nodes))]


def test_a_run_shows_its_model(tmp_path: Path) -> None:
    decisions = {"kernel_0": "k3", "kernel_1": "k5", "kernel_2": "k3", "kernel_3": "k3", "depth": "k3"}
    page = page_of(write_nodes(write_run(tmp_path / "run"), residual(4, [1]), decisions))
    assert "classifier: 19,074 parameters, 19 nodes, 1 of them changed" in page.text
    assert page.source.count('class="node changed"') == 1
    assert f"Conv2d kernel blocks.1.convolution · 16{TIMES}8{TIMES}8" in page.text
    assert "5 decisions of classifier" in page.text
    assert "kernel_1 k5 k3, k5 kernel_2 .. kernel_3 (2) k3 k3, k5" in page.text


def test_a_run_without_spaces_has_no_such_section(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "run"))
    assert "<h2>Model</h2>" not in page.source
    assert "Notes on this folder" not in page.text


def test_many_decisions_wait_until_they_are_asked_for(tmp_path: Path) -> None:
    decisions = {f"kernel_{number}": "k5" if number % 2 else "k3" for number in range(100)}
    page = page_of(write_nodes(write_run(tmp_path / "run"), [], decisions))
    assert "<summary>100 decisions of classifier</summary>" in page.source


def test_what_is_unchanged_is_one_box(tmp_path: Path) -> None:
    assert sizes(tmp_path, residual(50)) == [[203]]


def test_a_changed_block_is_opened(tmp_path: Path) -> None:
    # The stem and a block before; convolution, norm, sum of the changed one; the rest.
    assert sizes(tmp_path, residual(9, [4])) == [[18], [1, 1, 1], [18]]


def test_chains_inside_of_a_changed_block_are_one_box(tmp_path: Path) -> None:
    nodes = [node("x"), node("a", "x", mutator="m"), *(node(f"b{i}", f"b{i - 1}" if i else "a") for i in range(6))]
    assert sizes(tmp_path, [*nodes, node("sum", "b5", "x")]) == [[1], [1, 6, 1]]


def test_parameters_that_are_read_are_no_boxes(tmp_path: Path) -> None:
    nodes = [node("x"), node("scale", kind="get_attr"), node("mul", "x", "scale", mutator="m")]
    assert sizes(tmp_path, nodes) == [[1], [1]]


@pytest.mark.parametrize(
    "nodes",
    [
        residual(3, [1]),
        cells(6),
    ],
    ids=["one block", "cells"],
)
def test_boxes_do_not_touch_and_wires_go_down(tmp_path: Path, nodes: list[Any]) -> None:
    parts = model_parts(nodes_of(tmp_path, nodes))
    shown = [each.id for part in parts for box in part.values() for each in box.nodes]
    assert sorted(shown) == sorted(each["id"] for each in nodes)
    for part in parts:
        drawn = model_part(part, {})
        assert len(drawn["boxes"]) == len(part)
        assert len(drawn["wires"]) == sum(len(box.inputs) for box in part.values())
        for one, other in itertools.combinations(drawn["boxes"], 2):
            is_apart = abs(one["x"] - other["x"]) >= (one["width"] + other["width"]) / 2
            assert is_apart or abs(one["y"] - other["y"]) >= NODE_HEIGHT
        for each in drawn["boxes"]:
            assert each["width"] / 2 < each["x"] < drawn["width"] - each["width"] / 2
            assert 0 < each["y"] < each["y"] + NODE_HEIGHT < drawn["height"]
        for each in drawn["wires"]:
            heights = [float(y) for y in re.findall(r",([\d.]+)", each["path"])]
            assert heights == sorted(heights)


def test_a_long_model_takes_columns(tmp_path: Path) -> None:
    nodes = [node(f"l{i}", *([f"l{i - 1}"] if i else []), mutator="m") for i in range(100)]
    [record], _ = read_models(write_nodes(tmp_path, nodes))
    [num_columns, width] = re.findall(r'style="columns:(\d+) (\d+)px;', model_section(record))[0]
    assert int(num_columns) >= 3
    assert int(num_columns) * int(width) < 1040


def test_what_is_too_tangled_is_one_box(tmp_path: Path) -> None:
    nodes = [node(f"l{i}", *(f"l{j}" for j in range(i)), mutator="m") for i in range(40)]
    assert sizes(tmp_path, nodes)[-1][-1] > 10
    page = page_of(write_nodes(write_run(tmp_path / "run"), nodes))
    assert re.search(r"\d+ nodes, \d+ changed", page.text)


def test_markup_in_nodes_and_decisions_is_text(tmp_path: Path) -> None:
    evil = '"><script>alert(1)</script><b onload=x>\x1b[2J'
    nodes = [node(evil, kind=evil, mutator=evil), node("b", evil), node("c", "b", kind=evil)]
    folder = write_nodes(write_run(tmp_path / "run"), nodes, {evil: evil})
    page = page_of(folder)
    assert "script" not in page.tags
    assert "<b onload" not in page.source
    assert "\x1b" not in page.source


STRANGE: list[Any] = [
    "{",
    "[1, 2]",
    {"problems": {"a": {"nodes": {"id": "x"}, "decisions": "x", "num_parameters": "many"}}},
    {"problems": {"a": {"nodes": [None], "decisions": [{"name": ["a"], "candidates": 7}], "num_parameters": -1e300}}},
    '{"problems": {"a": {"nodes": [' + ", ".join(["{}"] * 800_000) + "]}}}",
]


def test_strange_files_are_a_note(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    for content in STRANGE:
        (folder / "nodes.json").write_text(content if isinstance(content, str) else json.dumps(content))
        assert "nodes.json could not be read" in page_of(folder).text


def test_a_node_reads_nodes_before_it_alone(tmp_path: Path) -> None:
    nodes = nodes_of(tmp_path, [node("a", "b"), node("b", "a", "b"), node("a", "a")])
    assert [(one.id, one.inputs) for one in nodes] == [("a", ()), ("b", ("a",))]


@pytest.mark.parametrize("nodes", [cells(150), [node("x" * 100_000 + str(i), mutator="y" * 1_000) for i in range(15)]])
def test_huge_graphs_are_bounded(tmp_path: Path, nodes: list[Any]) -> None:
    [record], _ = read_models(write_nodes(tmp_path, nodes))
    assert len(record.nodes) <= MAX_NODES
    assert 0 < len(model_section(record)) < 2_000_000
