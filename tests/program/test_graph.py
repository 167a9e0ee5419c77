"""The graph: what it answers, and every fault that validation finds."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest

from mlotool.core.errors import ConfigError
from mlotool.program import Graph, ProblemNode

UP, DOWN = {"reweight": ["classifier"]}, {"classifier": ["reweight"]}
NODES = {
    "reweight": ProblemNode({"model": "classifier"}),
    "classifier": ProblemNode({"model": "classifier", "weigher": "reweight"}),
}
# Three levels: reweight shapes pretrain; pretrain -> finetune -> reweight.
ADAPTATION = Graph({"reweight": ["pretrain"]}, {"pretrain": ["finetune"], "finetune": ["reweight"]})


def faults(graph: Graph, problems: Mapping[str, ProblemNode] = NODES) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        graph.validate(problems)
    return str(caught.value).split("\n")


def test_a_good_graph_passes() -> None:
    Graph(UP, DOWN).validate(NODES)
    ADAPTATION.validate(
        {
            "reweight": ProblemNode({"model": "finetune"}),
            "pretrain": ProblemNode({"model": "pretrain", "weigher": "reweight"}),
            "finetune": ProblemNode({"model": "finetune", "start": "pretrain"}),
        }
    )
    Graph().validate({"alone": ProblemNode({"model": "alone"})})


def test_uppers_lowers_and_readers() -> None:
    assert (ADAPTATION.uppers("pretrain"), ADAPTATION.uppers("finetune")) == (("reweight",), ())
    assert (ADAPTATION.lowers("reweight"), ADAPTATION.lowers("pretrain")) == (("finetune",), ())
    assert (ADAPTATION.readers("pretrain"), ADAPTATION.readers("reweight")) == (("finetune",), ())
    assert ADAPTATION.below("reweight") == {"pretrain", "finetune"}
    assert ADAPTATION.below("pretrain") == set()


def test_leaves_keep_the_order_of_the_problems() -> None:
    graph = Graph({}, {"b": ["top"], "a": ["top"]})
    assert graph.leaves(["b", "top", "alone", "a"]) == ("b", "alone", "a")


def test_the_level_is_the_longest_chain_below() -> None:
    graph = Graph({"top": ["base"]}, {"base": ["left", "top"], "left": ["top"], "other": ["top"]})
    assert [graph.level(name) for name in ("base", "left", "other", "top")] == [0, 1, 0, 2]
    assert [ADAPTATION.level(name) for name in ("pretrain", "finetune", "reweight")] == [0, 1, 2]
    assert Graph().level("alone") == 0


def test_mermaid() -> None:
    assert ADAPTATION.mermaid() == (
        "graph TD\n"
        "    reweight -->|shapes| pretrain\n"
        "    pretrain -.->|solution| finetune\n"
        "    finetune -.->|solution| reweight\n"
    )


@pytest.mark.parametrize("key", ["upper_to_lower", "lower_to_upper"])
def test_a_name_instead_of_a_list(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Graph(**{key: {"reweight": "classifier"}})
    message = str(caught.value)
    assert message.startswith(f"graph.{key}.reweight: found 'classifier'; expected a list")
    assert f"Write graph.{key}.reweight: [classifier]." in message


@pytest.mark.parametrize("key", ["upper_to_lower", "lower_to_upper"])
@pytest.mark.parametrize(
    ("edges", "match"),
    [
        ([("a", "b")], r": found \[\('a', 'b'\)\]; expected lists of problems by problem. Write .*: {a: \[b\]}"),
        ("a", ": found 'a'; expected lists of problems by problem"),
        ({"a": 3}, r".a: found 3; expected a list of problems' names. Write .*.a: \[<name>\]"),
    ],
)
def test_edges_of_another_type(key: str, edges: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=f"^graph.{key}{match}"):
        Graph(**{key: edges})


def test_an_edge_that_is_written_twice_counts_once() -> None:
    twice = Graph({"reweight": ["classifier"] * 2}, {"classifier": ["reweight"] * 2})
    assert twice == Graph(UP, DOWN)
    assert (twice.uppers("classifier"), twice.lowers("reweight")) == (("reweight",), ("classifier",))


@pytest.mark.parametrize("edges", [None, {}])
def test_no_edges_may_be_null(edges: dict[str, list[str]] | None) -> None:
    graph = Graph(edges, edges)  # type: ignore[arg-type]
    assert graph.leaves(["a"]) == ("a",)
    assert Graph({"a": None}).upper_to_lower == {"a": ()}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("graph", "key"),
    [
        (Graph({"reweight": ["clasifier"]}, DOWN), "upper_to_lower"),
        (Graph(UP, {"clasifier": ["reweight"]}), "lower_to_upper"),
    ],
)
def test_an_unknown_name(graph: Graph, key: str) -> None:
    (message,) = faults(graph)
    assert message == (
        f"graph.{key}: unknown problem 'clasifier'; expected one of reweight, classifier. "
        "Did you mean 'classifier'? Correct the name, or add problems.clasifier."
    )


@pytest.mark.parametrize("key", ["upper_to_lower", "lower_to_upper"])
def test_an_edge_from_a_problem_to_itself(key: str) -> None:
    edges = {"upper_to_lower": UP, "lower_to_upper": DOWN}
    edges[key] = {**edges[key], "classifier": ["classifier", *edges[key].get("classifier", [])]}
    (message,) = faults(Graph(**edges))
    assert message.startswith(f"graph.{key}.classifier: an edge from 'classifier' to itself; expected")
    assert "Remove 'classifier' from the list" in message


def test_a_cycle_of_solutions() -> None:
    ring = {"a": ["b"], "b": ["c"], "c": ["a"]}
    nodes = {"a": ProblemNode({"r": "c"}), "b": ProblemNode({"r": "a"}), "c": ProblemNode({"r": "b"})}
    (message,) = faults(Graph({}, ring), nodes)
    assert message.startswith("graph.lower_to_upper: a cycle ")
    assert "expected that solutions flow upwards only. Remove one of these edges" in message
    cycle = message.removeprefix("graph.lower_to_upper: a cycle ").split(";")[0].split(" -> ")
    assert len(cycle) == 4
    assert all(end in ring[start] for start, end in pairwise(cycle))


def test_a_problem_that_shapes_one_whose_solution_does_not_come_back() -> None:
    messages = faults(Graph(UP, {}))
    assert messages[0] == (
        "graph.upper_to_lower.reweight: 'reweight' shapes 'classifier', but no solution comes back from 'classifier' "
        "to 'reweight'; expected a path of lower_to_upper edges. Write graph.lower_to_upper.classifier: [reweight]."
    )


def test_a_solution_may_come_back_by_a_detour_but_not_downwards() -> None:
    nodes = {name: ProblemNode({"a": "low", "b": "mid", "c": "top"}) for name in ("low", "mid", "top")}
    back = {"low": ["mid"], "mid": ["top"]}
    assert not [each for each in faults(Graph({"top": ["low"]}, back), nodes) if "comes back" in each]
    messages = faults(Graph({"low": ["top"]}, back), nodes)
    assert any("'low' shapes 'top', but no solution comes back from 'top' to 'low'" in each for each in messages)


def test_a_role_without_an_edge() -> None:
    nodes = {**NODES, "other": ProblemNode({"model": "other", "teacher": "classifier"})}
    (message,) = faults(Graph(UP, DOWN), nodes)
    assert message == (
        "problems.other.loss.roles.teacher: 'classifier' plays a role in the loss of 'other', but no edge joins them; "
        "expected one. Write graph.lower_to_upper.classifier: [other] if 'other' reads its solution, "
        "or graph.upper_to_lower.classifier: [other] if 'classifier' shapes 'other'."
    )


def test_a_role_of_an_unknown_problem() -> None:
    nodes = {**NODES, "reweight": ProblemNode({"model": "classifier", "extra": "clasifier"})}
    (message,) = faults(Graph(UP, DOWN), nodes)
    assert message.startswith("problems.reweight.loss.roles.extra: unknown problem 'clasifier'; expected one of ")
    assert "Did you mean 'classifier'?" in message


@pytest.mark.parametrize(
    ("name", "key", "start"),
    [("classifier", "upper_to_lower", "reweight"), ("reweight", "lower_to_upper", "classifier")],
)
def test_an_edge_that_nothing_uses(name: str, key: str, start: str) -> None:
    nodes = {**NODES, name: ProblemNode({"model": name})}
    (message,) = faults(Graph(UP, DOWN), nodes)
    assert message == (
        f"graph.{key}.{start}: nothing uses the edge to '{name}'; expected that the loss of '{name}' has a role for "
        f"'{start}', or its optimizer or reset_to names it. Write "
        f"problems.{name}.loss.roles.<role>: {start}, or remove the edge."
    )


def test_an_edge_may_be_used_outside_the_loss() -> None:
    node = ProblemNode({"model": "classifier"}, other_uses={"reset_to": "reweight"})
    Graph(UP, DOWN).validate({**NODES, "classifier": node})


def test_all_faults_come_at_once() -> None:
    messages = faults(Graph({"reweigt": ["classifier"]}, {"classifier": ["classifier"], "x": ["reweight"]}))
    assert len(messages) == 3
    nodes = {
        "low": ProblemNode({"weigher": "top"}),
        "mid": ProblemNode({"teacher": "low"}),
        "top": ProblemNode({}),
    }
    messages = faults(Graph({"top": ["low"]}, {"mid": ["top"]}), nodes)
    assert sorted(each.split(":")[0] for each in messages) == [
        "graph.lower_to_upper.mid",  # unused
        "graph.upper_to_lower.top",  # no way back
        "problems.mid.loss.roles.teacher",  # no edge
    ]


def test_a_list_in_a_list_is_no_list_of_problems() -> None:
    with pytest.raises(ConfigError, match=r"graph\.upper_to_lower\.a: found \[\['b'\]\]; expected a list of problems"):
        Graph({"a": [["b"]]}, {})  # type: ignore[list-item]
