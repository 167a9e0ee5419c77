from itertools import combinations

import pytest

from mlotool.report.graph import Layout, arrange, problem_graph
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


WIDTH = 200.0


def lay_out(name: str) -> Layout:
    problems, shapes, reads, _ = GRAPHS[name]
    return arrange(dict.fromkeys(problems, WIDTH), [*shapes, *reads], 44.0, 30.0)


@pytest.mark.parametrize("name", GRAPHS)
def test_uppers_stand_above_lowers_and_boxes_do_not_overlap(name: str) -> None:
    problems, shapes, reads, levels = GRAPHS[name]
    layout = lay_out(name)
    assert [layout.num_rows - 1 - layout.row[each] for each in problems] == levels
    for a, b in combinations(problems, 2):
        assert abs(layout.x[a] - layout.x[b]) >= WIDTH or layout.row[a] != layout.row[b]
    assert all(WIDTH / 2 <= layout.x[each] <= layout.width - WIDTH / 2 for each in problems)
    assert layout.chains.keys() == {*shapes, *reads}


def test_an_edge_that_skips_a_row_passes_beside_its_boxes() -> None:
    layout = lay_out("skip")
    _, lane, _ = layout.chains["u", "l"]
    assert abs(layout.x[lane] - layout.x["m"]) > WIDTH / 2


def test_a_diamond_has_no_crossing() -> None:
    layout = arrange(dict.fromkeys("tabcdl", WIDTH), [*map(tuple, ["ta", "tb", "ad", "bc", "dl", "cl"])], 44.0, 30.0)
    assert (layout.x["a"] < layout.x["b"]) == (layout.x["d"] < layout.x["c"])


def test_a_cycle_still_gives_a_picture() -> None:
    assert set(arrange({"a": 100.0, "b": 100.0}, [("a", "b"), ("b", "a")], 44.0, 30.0).row) == {"a", "b"}


def test_each_problem_may_have_a_hypergradient_of_its_own() -> None:
    config = mwn_config()
    own = {"_target_": "mlotool.hypergradient.FirstOrder"}
    config["problems"]["classifier"] = problem("MLP", 0.1, hypergradient=own)
    picture = problem_graph(config, {"reweight": "problem-0", "classifier": "problem-1"})
    assert picture is not None
    assert "first order" in picture
    assert "identity" not in picture
    assert picture.count("stroke-dasharray") == 1
