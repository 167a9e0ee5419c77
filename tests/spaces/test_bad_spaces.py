"""Spaces that make no model are refused before anything is trained: with the node, and what to do."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch import Tensor, nn

from mlotool.core.errors import ConfigError, InfeasibleModelError
from mlotool.spaces import (
    AbstractMutator,
    HasSetting,
    Input,
    ModelGraph,
    Operator,
    Repeat,
    Space,
    choose,
    deciding,
)


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


def chosen(mutator: AbstractMutator, decisions: dict[str, Any], make: Callable[[], nn.Module] = base) -> Space:
    return Space(make, [mutator], inputs=[1, 8, 8], decisions=decisions)


def test_a_broadcast_does_not_hide_a_wrong_shape() -> None:
    narrow = Operator("path", "second", {"keep": None, "narrow": partial(nn.Conv2d, out_channels=1)})
    text = refusal(lambda: chosen(narrow, {"path_0": "narrow"}, Skip), InfeasibleModelError)
    assert "mutator 'path': node ':add' is given (b, 4, 8, 8) and (b, 1, 8, 8), of which torch would stretch" in text
    assert "expected equal shapes" in text


def test_channels_that_do_not_fit() -> None:
    wide = Operator("wide", "0", {"keep": None, "wide": partial(nn.Conv2d, out_channels=6)})
    text = refusal(lambda: chosen(wide, {"wide_0": "wide"}), InfeasibleModelError)
    assert "mutator 'wide': node '2' does not take what it is given ((b, 6, 8, 8))" in text
    assert "expected shapes that fit" in text


def test_another_result() -> None:
    wide = Operator("wide", "2", {"keep": None, "wide": partial(nn.Conv2d, out_channels=6)})
    text = refusal(lambda: chosen(wide, {"wide_0": "wide"}), InfeasibleModelError)
    assert "the model returns (b, 6, 8, 8), and without mutators (b, 4, 8, 8)" in text


@pytest.mark.parametrize(
    ("at", "found"),
    [
        ("nothing", "no place for path 'nothing'"),
        ("3", "no place for path '3'"),
        ({"type": "Conv3d"}, "Did you mean 'Conv2d'?"),
        ({"where": HasSetting("stride", 7)}, "no place for where 'HasSetting'"),
        ({"chain": ["2", "0"]}, "no place for a chain of path '2', then path '0'"),
        ({}, "found {}; expected a path"),
        ({"pathh": "0"}, "expected a path such as"),
        ({"path": 3}, "at.path: found 3; expected a text"),
        ({"where": "os.system"}, "at.where: found 'os.system'; expected a predicate"),
        ({"chain": "01"}, "at.chain: found '01'; expected at least two targets"),
        ({"chain": ["0"]}, "expected at least two targets"),
        ({"chain": ["0", "1"], "path": "0"}, "or another key beside it"),
    ],
)
def test_places_that_there_are_not(at: Any, found: str) -> None:
    text = refusal(lambda: chosen(Operator("kernel", at, {"keep": None}), {}))
    assert text.startswith("mutator 'kernel': at")
    assert found in text
    assert text.count("; expected") == 1


def test_places_that_overlap() -> None:
    nested = partial(nn.Sequential, nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU()))
    text = refusal(lambda: chosen(Repeat("depth", "**", [1, 2]), {}, nested))
    assert "which share nodes; expected places beside each other" in text


def test_a_repetition_of_what_it_has_made_is_none() -> None:
    """Places are found before anything is repeated, so that a repetition ends."""
    space = chosen(Repeat("depth", {"where": lambda place: place.id.endswith("2")}, [3]), {})
    assert [each.id for each in space.nodes][3:-1] == ["2", "depth_0_1.2", "depth_0_2.2"]
    text = refusal(lambda: Repeat("depth", "0", [10**9]))
    assert "expected whole numbers from 0 to 1000" in text


def test_long_texts_are_cut() -> None:
    long = "stages." * 1_500
    targets = [long, {"chain": [long] * 50}, {"type": long}, [long]]
    texts = [refusal(lambda at=at: chosen(Operator("kernel", at, {"keep": None}), {})) for at in targets]
    texts += [
        refusal(lambda: Space(base, inputs=[1, 8, 8], leaves=[long])),
        refusal(lambda: chosen(Operator(long, "0", {"keep": None}), {})),
        refusal(lambda: chosen(Operator("kernel", "0", {"keep": None}), {long: "keep"})),
        refusal(lambda: chosen(Operator("kernel", "0", {long: None}), {})),
    ]
    assert max(map(len, texts)) < 1_000


class Failing:
    def __call__(self, place: Any) -> bool:
        return place.module.kernel_size > 3  # type: ignore[no-any-return]


class Vague:
    def __call__(self, place: Any) -> Any:
        return place.module


@pytest.mark.parametrize(
    ("where", "words"),
    [
        (Failing(), ["test_bad_spaces.Failing (", "in __call__: TypeError: '>' not supported between", "'0 (Conv2d)'"]),
        (Vague(), ["test_bad_spaces.Vague (", "returned a Conv2d; expected True or False", "Return bool(..)"]),
    ],
)
def test_predicates_that_fail(where: Any, words: list[str]) -> None:
    for at in ({"where": where}, {"chain": [{"where": where}, "1"]}):
        text = refusal(lambda at=at: chosen(Operator("kernel", at, {"keep": None}), {}))
        assert text.startswith("mutator 'kernel': at.where: ")
        for word in words:
            assert word in text, text


def test_settings_that_are_lists_in_yaml() -> None:
    space = chosen(Operator("kernel", {"where": HasSetting("stride", [1, 1])}, {"keep": None}), {})
    assert len(space.decisions) == 2


def test_a_name_twice() -> None:
    twice = [Operator("kernel", "0", {"keep": None}), Operator("kernel", "2", {"keep": None})]
    text = refusal(lambda: Space(base, twice, inputs=[1, 8, 8]))
    assert "decisions.kernel_0: found two decisions of this name" in text

    def two_spaces() -> None:
        with deciding():
            for _ in range(2):
                Space(base, twice[:1], inputs=[1, 8, 8])

    assert "found two decisions of this name" in refusal(two_spaces)


@pytest.mark.parametrize("name", ["Kernel", "a b", "", "x" * 101, "ä", "seed", 3])
def test_names_of_decisions(name: Any) -> None:
    assert "expected a name of a-z, 0-9 and '_'" in refusal(lambda: choose(name, ["a", "b"]))


@pytest.mark.parametrize("candidates", [[], ["a", "a"], ["A"], [1.5], [True], [None], ["a b"], [["a"]], ["${seed}"]])
def test_candidates(candidates: list[Any]) -> None:
    assert "different names of a-z" in refusal(lambda: choose("width", candidates))


def test_decisions_that_nobody_asks_for_or_that_are_none() -> None:
    kernel = Operator("kernel", "0", {"keep": None, "same": partial(nn.Conv2d)})
    text = refusal(lambda: chosen(kernel, {"kernal_0": "keep"}))
    assert "no model asks for a decision of this name" in text
    assert "Did you mean 'kernel_0'?" in text
    text = refusal(lambda: chosen(kernel, {"kernel_0": "some"}))
    assert "found 'some'; expected one of keep, same. Did you mean 'same'?" in text


def test_inputs_and_bases() -> None:
    kernel = [Operator("kernel", "0", {"keep": None})]
    assert "inputs: node '0' does not take" in refusal(lambda: Space(base, kernel, inputs=[3, 8, 8]))
    assert "inputs: found 2, while the forward" in refusal(lambda: Space(base, kernel, inputs=[[1, 8, 8], [2]]))
    for wrong in ([[1.5]], [[-1]], ["abc"], [{"shape": [2], "dtype": "int"}], [{"shape": [2], "more": 1}], [None]):
        assert "inputs: found" in refusal(lambda wrong=wrong: Space(base, kernel, inputs=wrong))


def test_a_module_is_once_more_only_where_somebody_can_make_it() -> None:
    depth = Repeat("depth", "2", [1, 2])
    text = refusal(lambda: Space(base(), [depth], inputs=[1, 8, 8], decisions={"depth_0": 2}))
    assert "the base was given as a module; expected a function that makes it" in text


def test_an_input_that_comes_later() -> None:
    class Backwards(AbstractMutator):
        name = "back"

        def mutate(self, graph: ModelGraph) -> None:
            graph.connect(graph.node("0"), graph.node("2"))

    text = refusal(lambda: chosen(Backwards(), {}), InfeasibleModelError)
    assert "mutator 'back': cannot connect input 0 of '0' to '2'" in text
    only = Space(base, [Input("skip", "2", {"type": "Conv2d"})], inputs=[1, 8, 8])
    assert only.decisions["skip_0"].candidates == (0, 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "inputs: found None; expected the shape"),
        ({"inputs": 64}, "inputs: found 64; expected a list"),
        ({"inputs": "64"}, "inputs: found '64'; expected a list"),
        ({"mutators": Operator("kernel", "0", {"keep": None}), "inputs": [1, 8, 8]}, "mutators: found"),
        ({"mutators": ["kernel"], "inputs": [1, 8, 8]}, "mutators: found ['kernel']; expected a list"),
        ({"leaves": "0", "inputs": [1, 8, 8]}, "leaves: found '0'; expected a list of texts"),
        ({"leaves": [3], "inputs": [1, 8, 8]}, "leaves: found [3]; expected a list of texts"),
        ({"base": "torch.nn.Linear", "inputs": [1]}, "base: found 'torch.nn.Linear'; expected what makes a module"),
        ({"base": lambda: 3, "inputs": [2]}, "base: found int"),
        ({"base": partial(nn.LazyLinear, 3), "inputs": [2]}, "base: found the lazy module"),
    ],
)
def test_settings_of_another_kind(settings: dict[str, Any], message: str) -> None:
    assert message in refusal(lambda: Space(**{"base": base, **settings}))
