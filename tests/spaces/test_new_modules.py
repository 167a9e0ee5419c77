"""New modules: what they start from, their type, that they change nothing that others read; bases that choose."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mlotool
from mlotool.config.building import build_module, derived_seed
from mlotool.core.errors import InfeasibleModelError
from mlotool.spaces import Branch, Cell, Insert, Operator, Repeat, Space, choose, deciding


def space(**settings: Any) -> Space:
    base = partial(nn.Sequential, nn.Linear(4, 4))
    return Space(base, [Operator("layer", "0", {"other": nn.Linear})], inputs=[4], **settings)


def weight(module: nn.Module, path: str = "0") -> Tensor:
    return module.get_submodule(path).get_parameter("weight")


def described(name: str) -> dict[str, Any]:
    linear = {"_target_": "torch.nn.Linear"}
    operator = {"_target_": "mlotool.spaces.Operator", "name": name, "at": "0", "candidates": {"other": linear}}
    base = {"_target_": "torch.nn.Sequential", "_args_": [{**linear, "in_features": 4, "out_features": 4}]}
    return {"_target_": "mlotool.spaces.Space", "base": base, "inputs": [4], "mutators": [operator]}


def test_two_spaces_of_a_recipe_start_apart() -> None:
    config = mlotool.compose("mwn", ["logger=csv"])
    both = {"_target_": "torch.nn.Sequential", "_args_": [described("left"), described("right")]}
    config.problems.classifier.module, config.problems.reweight.module = both, described("only")
    one, again = (build_module(config, "classifier") for _ in range(2))
    other = build_module(config, "reweight")
    starts = [weight(one, "0.0"), weight(one, "1.0"), weight(other)]
    assert not any(torch.equal(starts[i], starts[j]) for i in range(3) for j in range(i))
    assert torch.equal(weight(one, "1.0"), weight(again, "1.0"))
    # A space that is the whole module has no place.
    assert torch.equal(weight(other), weight(space(seed=derived_seed(config.seed, "module", "reweight"))))


def base() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))


def first_in_place() -> nn.Module:
    return nn.Sequential(nn.Sequential(nn.ReLU(inplace=True)), nn.Linear(4, 4))


@pytest.mark.parametrize("candidate", [partial(nn.ReLU, inplace=True), first_in_place])
def test_a_branch_leaves_what_others_read(candidate: Any) -> None:
    space = Space(base, [Branch("beside", "1", {"new": candidate})], inputs=[4])
    first, second, third = (space.get_submodule(path) for path in "012")
    x = torch.randn(3, 4)
    assert torch.equal(space(x), third(second(first(x)) + space.beside_0(first(x))))


def test_a_cell_leaves_what_others_read() -> None:
    candidates = {"new": first_in_place, "identity": None}
    cell = Cell("cell", "1", candidates, num_nodes=1, num_inputs=2, end="sum")
    decisions = {"cell_0_0_input_b": 0, "cell_0_0_operation_b": "identity"}
    space = Space(base, [cell], inputs=[4], decisions=decisions)
    x = torch.randn(3, 4)
    h = space.get_submodule("0")(x)
    assert torch.equal(space(x), space.get_submodule("2")(space.cell_0_0_a(h.clone()) + h))


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu_() * 2


@pytest.mark.parametrize("mutator", [Branch, Operator, Insert])
def test_a_candidate_whose_own_code_changes_its_input_is_infeasible(mutator: Any) -> None:
    with pytest.raises(InfeasibleModelError, match=r"changes in place what '[01]' returns.*Take a candidate"):
        Space(base, [mutator("new", "1", {"in_place": InPlace})], inputs=[4])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_new_modules_have_the_type_of_their_place(dtype: torch.dtype) -> None:
    def typed() -> nn.Module:
        return nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 4), nn.ReLU()).to(dtype)

    mutators = [
        Operator("embedding", "0", {"new": partial(nn.Embedding, 3, 4)}),
        Operator("layer", "1", {"new": nn.Linear}),
        Insert("norm", "2", {"new": nn.LayerNorm}),
        Repeat("depth", "1", [2]),
    ]
    space = Space(typed, mutators, inputs=[{"shape": [5], "dtype": "int64"}])
    assert {each.dtype for each in space.parameters()} == {dtype}
    assert space(torch.zeros(2, 5, dtype=torch.int64)).dtype == dtype


def chosen() -> nn.Module:
    width = choose("width", [4, 8])
    return nn.Sequential(nn.Linear(2, width), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3))


def test_a_base_that_chooses_and_its_mutators_are_both_asked() -> None:
    mutators = [Repeat("depth", "1", [1, 3]), Operator("activation", {"type": "ReLU"}, {"relu": None, "tanh": nn.Tanh})]
    space = Space(chosen, mutators, inputs=[2], decisions={"width": 8, "depth_0": 3})
    assert list(space.decisions) == ["width", "depth_0", "activation_0"]
    sizes = [tuple(each.weight.shape) for each in space.modules() if isinstance(each, nn.Linear)]
    assert sorted(sizes) == [(3, 8), (8, 2), (8, 8), (8, 8), (8, 8)]
    with deciding({"width": 8, "depth_0": 3}) as decisions:
        Space(chosen, mutators, inputs=[2])
    assert decisions.values == {"width": 8, "depth_0": 3, "activation_0": "relu"}


class Candidate(nn.Module):
    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.layer = nn.Linear(in_features, out_features)
        self.act = choose("act", {"relu": nn.ReLU, "tanh": nn.Tanh})()

    def forward(self, values: Tensor) -> Tensor:
        return self.act(self.layer(values))  # type: ignore[no-any-return]


def test_a_candidate_that_chooses_has_one_answer_for_its_places_and_copies() -> None:
    mutators = [Operator("own", {"type": "Linear"}, {"own": Candidate}), Repeat("more", "1", [3])]
    space = Space(base, mutators, inputs=[4], decisions={"act": "tanh"})
    assert {name: each.value for name, each in space.decisions.items()}["act"] == "tanh"
    assert sum(isinstance(each, nn.Tanh) for each in space.modules()) == 5
    assert not any(isinstance(each, nn.ReLU) for each in space.modules())
    assert Space(base, mutators, inputs=[4]).decisions["act"].value == "relu"
