"""Which solutions depend on which parameters; and a ladder of many paths."""

from typing import Any

import pytest

from mlotool.core.errors import ConfigError
from mlotool.hypergradient import Exact, Implicit
from mlotool.problem.interface import Vector
from mlotool.program import Graph, LowerView
from mlotool.program.algorithms import SolutionOrder
from tests.program.small import samples, web
from tests.programs import ladder

BILEVEL = Graph({"u": ["w"]}, {"w": ["u"]})
TRILEVEL = Graph({"top": ["low"]}, {"low": ["mid"], "mid": ["top"]})
NESTED = Graph({"top": ["mid"], "mid": ["low"]}, {"low": ["mid", "top"], "mid": ["top"]})
DIAMOND = Graph({"top": ["base"]}, {"base": ["left", "right"], "left": ["top"], "right": ["top"]})
TWO_UPPERS = Graph({"a": ["w"], "b": ["w"]}, {"w": ["a", "b"]})
# Both siblings shape and read one lower problem, and the top one shapes a sibling and reads both.
SIBLINGS = Graph({"top": ["a"], "a": ["low"], "b": ["low"]}, {"low": ["a", "b"], "a": ["top"], "b": ["top"]})


def steps(graph: Graph, name: str, partial: tuple[str, ...] = ()) -> dict[str, tuple[str, ...]]:
    return {step.problem: step.inputs for step in SolutionOrder(graph, partial).steps_of(name)}


def test_two_and_three_levels() -> None:
    assert SolutionOrder(BILEVEL).influenced("w") == frozenset()
    assert (steps(BILEVEL, "u"), steps(BILEVEL, "w")) == ({"w": ("u",)}, {})
    assert [step.problem for step in SolutionOrder(BILEVEL).steps_to("w")] == ["w"]
    assert SolutionOrder(TRILEVEL).influenced("top") == {"low", "mid"}
    assert list(steps(TRILEVEL, "top").items()) == [("low", ("top",)), ("mid", ("low",))]
    assert steps(TRILEVEL, "mid") == {}  # it reads low, but does not shape it


def test_what_a_stepwise_problem_reads_is_eliminated_inside_it() -> None:
    (mid,) = SolutionOrder(TRILEVEL, stepwise=["mid"]).steps_of("top")
    assert (mid.problem, mid.inputs) == ("mid", ("top",))
    assert [(step.problem, step.inputs) for step in mid.inner] == [("low", ("top",))]
    assert SolutionOrder(TRILEVEL, stepwise=["mid"]).read_by("mid") == (("top",), ("low",))
    assert SolutionOrder(TRILEVEL).read_by("mid") == (("low",), ())
    assert SolutionOrder(NESTED).read_by("mid") == ((), ("low",))


def test_two_uppers_over_one_lower_problem_each_hold_the_other_fixed() -> None:
    assert steps(TWO_UPPERS, "w") == {}
    for name in "ab":
        assert SolutionOrder(TWO_UPPERS).influenced(name) == {"w"}
        assert steps(TWO_UPPERS, name) == {"w": ("a", "b")}


def test_a_nested_problem_eliminates_the_solution_that_it_shapes() -> None:
    dependence = SolutionOrder(NESTED)
    assert dependence.inputs("mid") == ("top",)
    assert dependence.inputs("low") == ("mid",)
    assert list(steps(NESTED, "top").items()) == [("mid", ("top",)), ("low", ("mid",))]
    assert steps(NESTED, "mid") == {"low": ("mid",)}


def test_the_inputs_of_an_eliminated_solution_are_inputs_of_the_nested_problem() -> None:
    graph = Graph({"top": ["base"], "mid": ["low"]}, {"base": ["low"], "low": ["mid"], "mid": ["top"]})
    assert SolutionOrder(graph).inputs("mid") == ("base",)
    assert list(steps(graph, "top").items()) == [("base", ("top",)), ("mid", ("base",))]
    assert steps(graph, "mid") == {"low": ("mid", "base")}


def test_the_partial_rule_cuts_what_the_nested_problem_shapes() -> None:
    """Betty's paths go down one edge and then only up: top -> mid -> top, not top -> mid -> low -> top."""
    dependence = SolutionOrder(NESTED, partial=["mid"])
    assert set(dependence.inputs("mid")) == {"top", "low"}
    assert dependence.influenced("top") == {"mid"}
    assert steps(NESTED, "mid", partial=("mid",)) == {"low": ("mid",)}
    # Where the top shapes the lower problem too, that path stays, without the part through mid.
    both = Graph({"top": ["mid", "low"], "mid": ["low"]}, NESTED.lower_to_upper)
    made = {step.problem: step for step in SolutionOrder(both, ["mid"]).steps_of("top")}
    assert set(made) == {"mid", "low"}
    assert (made["low"].constants, made["mid"].constants) == ({"mid"}, frozenset())


def test_siblings_that_depend_on_each_other_are_refused_by_name() -> None:
    with pytest.raises(ConfigError) as caught:
        SolutionOrder(SIBLINGS).steps_of("top")
    message = str(caught.value)
    assert "a -> b -> a" in message or "b -> a -> b" in message
    with pytest.raises(ConfigError, match="depend on each other"):
        web(SIBLINGS.upper_to_lower, SIBLINGS.lower_to_upper)
    web(TWO_UPPERS.upper_to_lower, TWO_UPPERS.lower_to_upper).gradient("a", {"w": samples(3), "a": samples(3, 1)})


class Counting(Implicit):
    """Counts its pullbacks."""

    def __init__(self) -> None:
        super().__init__(Exact())
        self.num_pullbacks = 0

    def pullback(self, view: LowerView, inputs: Vector) -> Any:
        self.num_pullbacks += 1
        return super().pullback(view, inputs)


def test_a_ladder_of_eight_paths_calls_each_pullback_once() -> None:
    """Its numbers are in hypergradient/test_references.py."""
    algorithms: list[Counting] = []

    def make() -> Counting:
        algorithms.append(Counting())
        return algorithms[-1]

    program = ladder(cubic=0.1).program(make)
    program.gradient("top")
    assert [each.num_pullbacks for each in algorithms] == [1] * 6 + [0]
