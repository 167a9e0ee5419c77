"""Spaces that make no model are refused before anything is trained: with the node, and what to do."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch import Tensor, nn

from mlotool.core.errors import ConfigError, InfeasibleModelError
from mlotool.spaces import AbstractMutator, HasSetting, Input, ModelGraph, Operator, Repeat, Space, choose


def base() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))


class Skip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        images = self.first(images)
        return images + self.second(images)


def refusal(make: Callable[[], Any], kind: type[Exception] = ConfigError) -> str:
    with pytest.raises(kind) as found:
        make()
    assert type(found.value) is kind
    return str(found.value)


def chosen(mutator: AbstractMutator, decisions: dict[str, Any], make: Any = base) -> Space:
    return Space(make, [mutator], inputs=[1, 8, 8], decisions=decisions)


OTHER = {"keep": None, "narrow": partial(nn.Conv2d, out_channels=1), "wide": partial(nn.Conv2d, out_channels=6)}


@pytest.mark.parametrize(
    ("at", "candidate", "make", "words"),
    [
        ("second", "narrow", Skip, "node ':add' is given (b, 4, 8, 8) and (b, 1, 8, 8), one of which torch"),
        ("0", "wide", base, "node '2' does not accept its input ((b, 6, 8, 8))"),
        ("2", "wide", base, "the model returns (b, 6, 8, 8), but without mutators (b, 4, 8, 8)"),
    ],
)
def test_shapes_that_do_not_fit(at: str, candidate: str, make: Any, words: str) -> None:
    """A broadcast does not hide a wrong shape either."""
    text = refusal(lambda: chosen(Operator("path", at, OTHER), {"path_0": candidate}, make), InfeasibleModelError)
    assert "mutator 'path': " in text and words in text


@pytest.mark.parametrize(
    ("at", "found"),
    [
        ("nothing", "no place for path 'nothing'"),
        ({"type": "Conv3d"}, "Did you mean 'Conv2d'?"),
        ({"where": HasSetting("stride", 7)}, "no place for where 'HasSetting'"),
        ({"chain": ["2", "0"]}, "no place for a chain of path '2', then path '0'"),
        ({"pathh": "0"}, "expected a text or {path: .."),
        ({"where": "os.system"}, "at.where: found 'os.system'; expected a predicate"),
        ({"where": lambda place: place.module}, "expected True or False"),
    ],
)
def test_places_that_there_are_not(at: Any, found: str) -> None:
    text = refusal(lambda: chosen(Operator("kernel", at, {"keep": None}), {}))
    assert text.startswith("mutator 'kernel': at") and found in text


def test_a_repetition_of_what_it_has_made_is_none() -> None:
    """Places are found before anything is repeated, so that a repetition ends."""
    space = chosen(Repeat("depth", {"where": lambda place: place.id.endswith("2")}, [3]), {})
    assert [node.id for node in space.nodes][3:-1] == ["2", "depth_0_1.2", "depth_0_2.2"]


KERNEL = Operator("kernel", "0", {"keep": None, "same": nn.Conv2d})


class Backwards(AbstractMutator):
    name = "back"

    def mutate(self, graph: ModelGraph) -> None:
        graph.connect(graph.node("0"), graph.node("2"))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: chosen(Repeat("depth", "**", [1, 2]), {}, lambda: nn.Sequential(base())), "places that share no node"),
        (lambda: Space(base, [KERNEL, KERNEL], inputs=[1, 8, 8]), "kernel_0: found two decisions of this name"),
        (lambda: choose("Kernel", ["a", "b"]), "expected a name of a-z, 0-9 and '_'"),
        (lambda: chosen(KERNEL, {"kernal_0": "keep"}), "Did you mean 'kernel_0'?"),
        (lambda: chosen(KERNEL, {"kernel_0": "some"}), "found 'some'; expected one of keep, same"),
        (lambda: Space(base, [KERNEL], inputs=[3, 8, 8]), "inputs: node '0' does not accept"),
        (lambda: Space(base, inputs=[[1, 8, 8], [2]]), "inputs: found 2; expected those of the forward"),
        (lambda: Space(base, ["kernel"], inputs=[1, 8, 8]), "mutators: found ['kernel']; expected a list"),
        (lambda: Space(partial(nn.LazyLinear, 3), inputs=[2]), "expected parameters whose shape is known"),
        (
            lambda: Space(base(), [Repeat("depth", "2", [2])], inputs=[1, 8, 8]),
            "the base was given as a module. Give a function that makes it",
        ),
    ],
)
def test_spaces_that_are_none(make: Callable[[], object], words: str) -> None:
    assert words in refusal(make)


def test_an_input_that_comes_later() -> None:
    text = refusal(lambda: chosen(Backwards(), {}), InfeasibleModelError)
    assert "mutator 'back': cannot connect input 0 of '0' to '2'" in text
    only = Space(base, [Input("skip", "2", {"type": "Conv2d"})], inputs=[1, 8, 8])
    assert only.decisions["skip_0"].candidates == (0, 1)
