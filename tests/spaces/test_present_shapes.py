"""Within one mutator, a place that is found has the shapes that there are then."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from mlotool.spaces import AbstractMutator, Branch, Cell, Grow, Insert, ModelGraph, Operator, Repeat, Space, Split


def base() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


OTHERS = {
    "insert": partial(Insert, candidates={"linear": nn.Linear}),
    "branch": partial(Branch, candidates={"linear": nn.Linear}),
    "operator": partial(Operator, candidates={"linear": nn.Linear}),
    "split": partial(Split, candidates={"linear": nn.Linear}),
    "cell": partial(Cell, candidates={"linear": nn.Linear}, num_nodes=1, num_inputs=1, end="sum"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_copy_is_changed_in_the_next_step(other: str) -> None:
    mutators = {"none": None, "again": partial(Repeat, counts=[2]), **OTHERS}
    grow = Grow("grow", {"type": "Linear"}, mutators, steps=2)
    decisions: dict[str, str | int] = {"grow_0": "again", "grow_1": other, "grow_1_place": 1}
    space = Space(base, [grow], inputs=[4], decisions=decisions)
    sizes = [tuple(each.weight.shape) for each in space.modules() if isinstance(each, nn.Linear)]
    num = 3 if other in ("operator", "cell") else 4
    assert sorted(sizes) == [(2, 4)] + (num - 1) * [(4, 4)]
    assert space(torch.randn(3, 4)).shape == (3, 2)


class Mine(AbstractMutator):
    name = "mine"

    def __init__(self, mutate: Callable[[ModelGraph], Any]) -> None:
        self._mutate = mutate

    def mutate(self, graph: ModelGraph) -> None:
        self._mutate(graph)


def widen(size: int) -> Callable[..., nn.Module]:
    return lambda in_features: nn.Linear(in_features, size)


def made(mutate: Callable[[ModelGraph], Any]) -> Space:
    return Space(base, [Mine(mutate)], inputs=[4])


def test_what_stands_behind_a_changed_size_is_found_with_it() -> None:
    shapes: list[Any] = []

    def wider(graph: ModelGraph) -> None:
        graph.replace(graph.find("0")[0], widen(12), "wide")
        places = [*graph.find("1"), *graph.find("2")]
        shapes.extend((each.input_shape, each.output_shape) for each in places)
        graph.replace(places[1], nn.Linear, "last")

    space = made(wider)
    assert shapes == [((12,), (12,)), ((12,), (2,))]
    assert space.get_parameter("2.weight").shape == (2, 12)
    assert space(torch.randn(3, 4)).shape == (3, 2)
