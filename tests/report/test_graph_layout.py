from itertools import combinations

import pytest

from mlotool.report.graph_layers import BOX_HEIGHT
from mlotool.report.graph_layout import Layout, arrange
from mlotool.report.graph_picture import graph_picture
from tests.report.run_folders import mwn_config, problem

Pairs = list[tuple[str, str]]
# name: problems, shaping (upper, lower), reading (upper, lower), expected levels
GRAPHS: dict[str, tuple[str, Pairs, Pairs, list[int]]] = {
    "one": ("a", [], [], [0]),
    "two levels": ("ul", [("u", "l")], [("u", "l")], [1, 0]),
    "three levels": ("uml", [("u", "m"), ("m", "l")], [("u", "m"), ("m", "l")], [2, 1, 0]),
    "skip": ("uml", [("u", "l"), ("m", "l")], [("u", "m"), ("m", "l")], [2, 1, 0]),
    "two uppers": ("uvl", [("u", "l"), ("v", "l")], [("u", "l"), ("v", "l")], [1, 1, 0]),
    "diamond": (
        "tabl",
        [("t", "a"), ("t", "b"), ("a", "l"), ("b", "l")],
        [("t", "a"), ("t", "b"), ("a", "l"), ("b", "l")],
        [2, 1, 1, 0],
    ),
    "diamond of five": (
        "tabcl",
        [("t", "l"), ("a", "l"), ("c", "l")],
        [("t", "a"), ("t", "b"), ("t", "c"), ("a", "l"), ("b", "l"), ("c", "l"), ("t", "l")],
        [2, 1, 1, 1, 0],
    ),
    "apart": ("ab", [], [], [0, 0]),
}


def lay_out(name: str) -> Layout:
    problems, shapes, reads, _ = GRAPHS[name]
    return arrange(list(problems), shapes, reads, dict.fromkeys(problems, 200.0), {low: 120.0 for _, low in reads})


@pytest.mark.parametrize("name", GRAPHS)
def test_uppers_stand_above_lowers_and_boxes_do_not_overlap(name: str) -> None:
    problems, _, _, levels = GRAPHS[name]
    layout = lay_out(name)
    assert [layout.boxes[each].layer for each in problems] == levels
    for a, b in combinations(layout.boxes.values(), 2):
        apart = abs(a.x - b.x) >= (a.width + b.width) / 2 or abs(a.y - b.y) >= BOX_HEIGHT
        assert apart
        assert (a.layer > b.layer) == (a.y < b.y)
    for box in layout.boxes.values():
        assert box.x - box.width / 2 >= 0
        assert box.x + box.width / 2 <= layout.width
        assert 0 <= box.y <= layout.height - BOX_HEIGHT


@pytest.mark.parametrize("name", GRAPHS)
def test_every_edge_is_a_wire_between_its_boxes(name: str) -> None:
    _, shapes, reads, _ = GRAPHS[name]
    layout = lay_out(name)
    assert sorted((wire.upper, wire.lower) for wire in layout.wires if not wire.solution) == sorted(shapes)
    assert sorted((wire.upper, wire.lower) for wire in layout.wires if wire.solution) == sorted(reads)
    for wire in layout.wires:
        top, bottom = (wire.points[-1], wire.points[0]) if wire.solution else (wire.points[0], wire.points[-1])
        for (x, _), box in ((top, layout.boxes[wire.upper]), (bottom, layout.boxes[wire.lower])):
            assert abs(x - box.x) <= box.width / 2
        assert top[1] == layout.boxes[wire.upper].y + BOX_HEIGHT
        assert bottom[1] <= layout.boxes[wire.lower].y


def test_a_wire_that_skips_a_layer_passes_beside_its_boxes() -> None:
    layout = lay_out("skip")
    (wire,) = (wire for wire in layout.wires if (wire.upper, wire.lower) == ("u", "l"))
    middle = layout.boxes["m"]
    assert all(abs(x - middle.x) > middle.width / 2 for x, y in wire.points[1:3])


def test_a_cycle_still_gives_a_picture() -> None:
    layout = arrange(["a", "b"], [("a", "b"), ("b", "a")], [], {"a": 100.0, "b": 100.0}, {})
    assert set(layout.boxes) == {"a", "b"}


def test_each_problem_may_have_a_hypergradient_of_its_own() -> None:
    config = mwn_config()
    own = {"_target_": "mlotool.hypergradient.FirstOrder"}
    config["problems"]["classifier"] = problem("MLP", 0.1, hypergradient=own)
    picture = graph_picture(config, {"reweight": "problem-0", "classifier": "problem-1"})
    assert picture is not None
    assert "first order" in picture
    assert "identity" not in picture
    assert picture.count("stroke-dasharray") == 1
