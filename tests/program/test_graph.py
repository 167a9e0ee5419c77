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
    node = ProblemNode({"model": "classifier"}, other_uses={"reset_to": "reweight"})
    Graph(UP, DOWN).validate({**NODES, "classifier": node})


def test_questions() -> None:
    assert (ADAPTATION.uppers("pretrain"), ADAPTATION.uppers("finetune")) == (("reweight",), ())
    assert (ADAPTATION.lowers("reweight"), ADAPTATION.lowers("pretrain")) == (("finetune",), ())
    assert (ADAPTATION.readers("pretrain"), ADAPTATION.readers("reweight")) == (("finetune",), ())
    assert (ADAPTATION.below("reweight"), ADAPTATION.below("pretrain")) == ({"pretrain", "finetune"}, set())
    graph = Graph({"top": ["base"]}, {"base": ["left", "top"], "left": ["top"], "other": ["top"]})
    assert graph.leaves(["other", "top", "alone", "base"]) == ("other", "alone", "base")


@pytest.mark.parametrize(
    ("edges", "match"),
    [
        ([("a", "b")], r": found \[\('a', 'b'\)\]; expected a list of problems for each problem. Write .*: {a: \[b\]}"),
        ({"a": "b"}, r".a: found 'b'; expected a list of problems' names. Write .*.a: \[b\]"),
    ],
)
def test_edges_of_another_type(edges: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=f"^graph.upper_to_lower{match}"):
        Graph(edges)
    assert Graph(None, {"a": None}) == Graph({}, {"a": []})  # type: ignore[arg-type, dict-item]


def test_mermaid() -> None:
    assert ADAPTATION.mermaid() == (
        "graph TD\n"
        "    reweight -->|shapes| pretrain\n"
        "    pretrain -.->|solution| finetune\n"
        "    finetune -.->|solution| reweight\n"
    )


OTHER = ProblemNode({"model": "other", "teacher": "classifier"})
SELF = ProblemNode({"model": "classifier"})
EXTRA = ProblemNode({"model": "classifier", "extra": "clasifier"})
FAULTS: dict[str, tuple[Graph, dict[str, ProblemNode], list[str]]] = {
    "an unknown lower problem": (
        Graph({"reweight": ["clasifier"]}, DOWN),
        NODES,
        ["graph.upper_to_lower: unknown problem 'clasifier'; expected one of reweight, classifier. Did you mean"],
    ),
    "an edge to itself": (
        Graph({**UP, "classifier": ["classifier"]}, DOWN),
        NODES,
        ["graph.upper_to_lower.classifier: an edge from 'classifier' to itself; expected"],
    ),
    "no way back": (
        Graph({"low": ["top"]}, {"low": ["mid"], "mid": ["top"]}),
        {name: ProblemNode({"a": "low", "b": "mid", "c": "top"}) for name in ("low", "mid", "top")},
        ["graph.upper_to_lower.low: 'low' shapes 'top', but no edges lead back from 'top' to 'low'"],
    ),
    "a role without an edge": (
        Graph(UP, DOWN),
        {**NODES, "other": OTHER},
        ["problems.other.loss.roles.teacher: 'classifier' fills a role in the loss of 'other', but there is no edge"],
    ),
    "a role of an unknown problem": (
        Graph(UP, DOWN),
        {**NODES, "reweight": EXTRA},
        ["problems.reweight.loss.roles.extra: unknown problem 'clasifier'; expected one of "],
    ),
    "an edge that nothing uses": (
        Graph(UP, DOWN),
        {**NODES, "classifier": SELF},
        ["graph.upper_to_lower.reweight: nothing uses the edge to 'classifier'; expected a role for"],
    ),
    "three at once": (
        Graph({"top": ["low"]}, {"mid": ["top"]}),
        {"low": ProblemNode({"weigher": "top"}), "mid": ProblemNode({"teacher": "low"}), "top": ProblemNode({})},
        ["graph.upper_to_lower.top", "problems.mid.loss.roles.teacher", "graph.lower_to_upper.mid"],
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults(name: str) -> None:
    graph, nodes, expected = FAULTS[name]
    if name == "no way back":
        # It may come by a detour.
        assert not any("comes back" in each for each in faults(Graph({"top": ["low"]}, graph.lower_to_upper), nodes))
    for text, message in zip(expected, faults(graph, nodes)[: len(expected)], strict=True):
        assert message.startswith(text)


def test_a_cycle_of_solutions() -> None:
    ring = {"a": ["b"], "b": ["c"], "c": ["a"]}
    nodes = {"a": ProblemNode({"r": "c"}), "b": ProblemNode({"r": "a"}), "c": ProblemNode({"r": "b"})}
    (message,) = faults(Graph({}, ring), nodes)
    assert message.startswith("graph.lower_to_upper: a cycle ")
    assert "expected edges from lower to upper problems only. Remove one edge" in message
    cycle = message.removeprefix("graph.lower_to_upper: a cycle ").split(";")[0].split(" -> ")
    assert len(cycle) == 4
    assert all(end in ring[start] for start, end in pairwise(cycle))
