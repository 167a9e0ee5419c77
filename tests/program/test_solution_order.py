"""Which solutions depend on which parameters; and a ladder with 2^10 paths."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mlotool.core.errors import ConfigError
from mlotool.hypergradient import Exact, Implicit
from mlotool.problem.interface import Vector
from mlotool.program import Graph, LowerView, Problem, Program
from mlotool.program.algorithms import SolutionOrder
from tests.program.small import numbers, samples, web
from tests.programs import Point

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


def test_a_diamond_is_made_once_and_in_order() -> None:
    order = list(steps(DIAMOND, "top"))
    assert sorted(order) == ["base", "left", "right"]
    assert order[0] == "base"
    assert steps(DIAMOND, "top")["left"] == ("base",)


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
    """Counts its pullbacks through the inputs' hooks: one call of the lower loss a pullback."""

    def __init__(self) -> None:
        super().__init__(Exact())
        self.num_losses = 0

    def pullback(self, view: LowerView, inputs: Vector) -> Any:
        function = view.own_loss

        def counted(theta: Vector, flat: Vector) -> Tensor:
            self.num_losses += 1
            return function(theta, flat)

        return super().pullback(replace(view, own_loss=counted), inputs)


def _ladder(num_diamonds: int) -> tuple[Program, list[Counting]]:
    """Return diamonds in series: base_i -> left_i, right_i -> base_(i+1); the last base is read by the top."""
    up, down = {"top": ["base0"]}, {}
    for i in range(num_diamonds):
        down[f"base{i}"] = [f"left{i}", f"right{i}"]
        down[f"left{i}"] = down[f"right{i}"] = [f"base{i + 1}"]
    down[f"base{num_diamonds}"] = ["top"]
    graph = Graph(up, down)
    algorithms, problems = [], []
    names = ["top", *down]
    for k, name in enumerate(names):
        algorithms.append(Counting())
        others = {*graph.uppers(name), *graph.lowers(name)}

        def loss(batch: None, *, own: Any, factor: float = 1.0 + 0.1 * (k % 7), **roles: Any) -> Tensor:
            x = own()
            total = 0.5 * factor * (x**2).sum()
            for place, role in enumerate(sorted(roles), start=1):
                total = total - (0.8 + 0.1 * place) * (x * roles[role]()).sum()
            return total

        roles = {"own": name, **{other: other for other in others}}
        problems.append(Problem(name, Point(numbers(0.3 + k)), loss, roles=roles, hypergradient=algorithms[-1]))
    return Program(problems, graph), algorithms


def _slope(num_diamonds: int) -> float:
    """Return d base_last / d top, stage by stage: x = sum of factors times what it reads, over its own factor."""
    own = [1.0 + 0.1 * (k % 7) for k in range(3 * num_diamonds + 2)]
    slope, k = 0.9 / own[1], 2  # base0 reads the top alone
    for _ in range(num_diamonds):
        left, right = 0.9 * slope / own[k], 0.9 * slope / own[k + 1]
        slope, k = (0.9 * left + 1.0 * right) / own[k + 2], k + 3
    return slope


def test_a_ladder_of_1024_paths_calls_each_pullback_once() -> None:
    program, algorithms = _ladder(10)
    assert len(program.problems) == 32
    assert sum(map(len, program.graph.lower_to_upper.values())) == 41
    found = program.gradient("top")["x"]
    assert [algorithm.num_losses for algorithm in algorithms] == [0] + [1] * 31
    top = float(program.problems["top"].module.x.detach())
    last = float(program.problems["base10"].module.x.detach())
    # C = 1/2 t^2 - 0.9 t b(t)
    expected = top - 0.9 * last - 0.9 * top * _slope(10)
    assert float(found) == pytest.approx(expected, rel=1e-12)
    assert abs(0.9 * top * _slope(10)) > 1e-3 * abs(expected)


def test_the_path_that_the_ladder_test_needs_carries_something() -> None:
    program, _ = _ladder(2)
    solution = program.solution("base2")["x"]
    (found,) = torch.autograd.grad(solution.sum(), program.problems["top"].theta["x"])
    assert float(found) == pytest.approx(_slope(2), rel=1e-12)
