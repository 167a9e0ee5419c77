import pytest

from mlotool.report.graph import Layout, arrange, problem_graph
from tests.report.run_folders import mwn_config, problem

WIDTH = 200.0
# name: problems, edges (upper, lower), expected levels
GRAPHS: dict[str, tuple[str, str, list[int]]] = {
    "one": ("a", "", [0]),
    "three levels": ("uml", "um ml", [2, 1, 0]),
    "skip": ("uml", "ul um ml", [2, 1, 0]),
    "two uppers": ("uvl", "ul vl", [1, 1, 0]),
    "diamond of five": ("tabcl", "tl al cl ta tb tc bl", [2, 1, 1, 1, 0]),
    "apart": ("ab", "", [0, 0]),
}


def lay_out(problems: str, edges: str) -> Layout:
    return arrange(dict.fromkeys(problems, WIDTH), [(upper, lower) for upper, lower in edges.split()], 44.0, 30.0)


@pytest.mark.parametrize("name", GRAPHS)
def test_uppers_stand_above_lowers(name: str) -> None:
    problems, edges, levels = GRAPHS[name]
    layout = lay_out(problems, edges)
    assert [layout.num_rows - 1 - layout.row[problem] for problem in problems] == levels
    assert all(WIDTH / 2 <= layout.x[problem] <= layout.width - WIDTH / 2 for problem in problems)
    assert layout.chains.keys() == {(upper, lower) for upper, lower in edges.split()}


def test_edges_do_not_cross_boxes_or_each_other() -> None:
    layout = lay_out("uml", "ul um ml")
    _, lane, _ = layout.chains["u", "l"]
    assert abs(layout.x[lane] - layout.x["m"]) > WIDTH / 2
    layout = lay_out("tabcdl", "ta tb ad bc dl cl")
    assert (layout.x["a"] < layout.x["b"]) == (layout.x["d"] < layout.x["c"])


def test_a_cycle_still_gives_a_picture() -> None:
    assert set(lay_out("ab", "ab ba").row) == {"a", "b"}


def test_each_problem_may_have_a_hypergradient_of_its_own() -> None:
    config = mwn_config()
    own = {"_target_": "mlotool.hypergradient.FirstOrder"}
    config["problems"]["classifier"] = problem("MLP", 0.1, hypergradient=own)
    picture = problem_graph(config, {"reweight": "problem-0", "classifier": "problem-1"})
    assert picture is not None and "first order" in picture and "identity" not in picture
    assert picture.count("stroke-dasharray") == 1
