"""Within one mutator, a place that is found has the shapes that there are then."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlotool.core.errors import InfeasibleModelError
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


def test_a_copy_is_found_with_its_shapes() -> None:
    shapes: list[Any] = []

    def again(graph: ModelGraph) -> None:
        graph.repeat(graph.find("0")[0], "again")
        [copy] = graph.find({"path": "again.0", "type": "Linear"})
        shapes.append((copy.input_shape, copy.output_shape))
        graph.insert(copy, nn.Tanh, "tanh")

    assert [each.id for each in made(again).nodes] == ["input", "0", "again.0", "tanh", "1", "2", "output"]
    assert shapes == [((4,), (4,))]


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


def test_places_that_were_found_before_get_modules_of_the_present_size() -> None:
    wide = {"wide": widen(6), "last": nn.Linear}
    both = Operator("size", {"type": "Linear"}, wide)
    space = Space(base, [both], inputs=[4], decisions={"size_0": "wide", "size_1": "last"})
    assert [tuple(each.weight.shape) for each in space.modules() if isinstance(each, nn.Linear)] == [(6, 4), (2, 6)]


def test_a_size_that_nobody_mends_is_refused_at_the_end() -> None:
    found = []

    def wider(graph: ModelGraph) -> None:
        graph.replace(graph.find("0")[0], widen(12), "wide")
        found.extend(graph.find({"type": "Linear"}))

    with pytest.raises(InfeasibleModelError, match=r"mutator 'mine': node '2' does not take what it is given \(\(b, 1"):
        made(wider)
    assert [each.output_shape for each in found] == [(12,), (2,)]


def test_a_size_that_is_mended_is_none() -> None:
    def there_and_back(graph: ModelGraph) -> None:
        graph.replace(graph.find("0")[0], widen(12), "wide")
        graph.find({"type": "Linear"})
        graph.replace(graph.find("0")[0], widen(4), "narrow")
        graph.insert(graph.find("2")[0], nn.Tanh, "tanh")

    assert [each.id for each in made(there_and_back).nodes] == ["input", "0", "1", "2", "tanh", "output"]


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.last(self.left(x) + self.right(x)))


def test_a_sum_that_was_stretched_for_a_while_has_its_old_shape() -> None:
    shapes = []

    def there_and_back(graph: ModelGraph) -> None:
        for path in ("left", "right"):
            graph.replace(graph.find(path)[0], widen(1), path)
            graph.find(path)
        for path in ("left", "right"):
            graph.replace(graph.find(path)[0], widen(4), path)
            shapes.append(graph.find(":add")[0].output_shape)

    Space(Sum, [Mine(there_and_back)], inputs=[4])
    assert shapes[-1] == (4,)


def test_what_is_deleted_and_connected_counts() -> None:
    shapes = []

    def narrower(graph: ModelGraph) -> None:
        last = graph.create("wide", widen(12), [graph.node("1")])
        graph.connect(graph.node("2"), last)
        shapes.append(graph.find("2")[0].input_shape)
        graph.delete(graph.find("wide")[0])
        shapes.append(graph.find("2")[0].input_shape)

    made(narrower)
    assert shapes == [(12,), (4,)]
