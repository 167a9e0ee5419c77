"""New modules: what they start from, their type, and that they change nothing that others read."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mlotool
from mlotool.config.building import build_module
from mlotool.core.errors import InfeasibleModelError
from mlotool.spaces import Branch, Cell, Insert, Operator, Repeat, Space


def space(**settings: Any) -> Space:
    base = partial(nn.Sequential, nn.Linear(4, 4))
    return Space(base, [Operator("layer", "0", {"other": nn.Linear})], inputs=[4], **settings)


def weight(module: nn.Module, path: str = "0") -> Tensor:
    return module.get_submodule(path).get_parameter("weight")


def test_spaces_of_one_seed_and_other_places() -> None:
    assert torch.equal(weight(space(seed=3)), weight(space(seed=3, place="")))
    starts = [weight(space(seed=3, place=place)) for place in ("", "left", "right", "left.0")]
    assert len({tuple(each.flatten().tolist()) for each in starts}) == 4
    assert torch.equal(starts[1], weight(space(seed=3, place="left")))


def described(name: str) -> dict[str, Any]:
    return {
        "_target_": "mlotool.spaces.Space",
        "base": {"_target_": "torch.nn.Sequential", "_args_": [{"_target_": "torch.nn.Linear", **SIZES}]},
        "inputs": [4],
        "mutators": [
            {
                "_target_": "mlotool.spaces.Operator",
                "name": name,
                "at": "0",
                "candidates": {"other": {"_target_": "torch.nn.Linear"}},
            }
        ],
    }


SIZES = {"in_features": 4, "out_features": 4}


def module_of(node: dict[str, Any]) -> nn.Module:
    config = mlotool.compose("plain", ["logger=csv"])
    config.problems.classifier.module = node
    return build_module(config, "classifier")


def test_two_spaces_in_a_module_of_a_recipe() -> None:
    both = [described("left"), described("right")]
    node = {"_target_": "torch.nn.Sequential", "_args_": both}
    module = module_of(node)
    assert not torch.equal(weight(module, "0.0"), weight(module, "1.0"))
    assert torch.equal(weight(module, "1.0"), weight(module_of(node), "1.0"))


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
    with pytest.raises(InfeasibleModelError, match=r"changes in place what '[01]' returns.*Correct the candidate"):
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
