"""New modules change nothing that others read, and have the type of the numbers at their place."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlotool.core.errors import InfeasibleModelError
from mlotool.spaces import Branch, Cell, Insert, Operator, Repeat, Space


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


def test_a_copy_of_a_layer_changes_nothing_either() -> None:
    beside = Branch("beside", "depth_0_1.1", {"same": nn.Identity})
    block = partial(nn.Sequential, nn.Linear(4, 4), nn.ReLU(inplace=True))
    space = Space(block, [Repeat("depth", "1", [2]), beside], inputs=[4])
    assert not space.get_submodule("depth_0_1.1").inplace


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


def images() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1))


def test_a_candidate_that_refuses_its_place_makes_no_model() -> None:
    grouped = Operator("g", {"type": "Conv2d"}, {"full": None, "grouped": partial(nn.Conv2d, groups=4)}, tied=True)
    with pytest.raises(InfeasibleModelError) as caught:
        Space(images, [grouped], inputs=[1, 8, 8], decisions={"g": "grouped"})
    for words in ("mutator 'g': node '0'", "Conv2d, groups=4,", "in_channels must be divisible by groups"):
        assert words in str(caught.value)


def test_an_assertion_of_torch_refuses_a_place() -> None:
    attention = partial(nn.TransformerEncoderLayer, nhead=3, dim_feedforward=8)
    with pytest.raises(InfeasibleModelError, match="divisible by num_heads"):
        Space(base, [Insert("attention", "1", {"new": attention})], inputs=[4])


def test_what_says_itself_that_there_is_no_model_is_told_with_its_place() -> None:
    def refuse(in_features: int) -> nn.Module:
        raise InfeasibleModelError(f"found {in_features} features; expected less")

    with pytest.raises(InfeasibleModelError, match=r"mutator 'one': node '1': found 4 features"):
        Space(base, [Operator("one", "1", {"new": refuse})], inputs=[4])


@pytest.mark.parametrize("candidate", [partial(nn.Linear, gruops=4), partial(nn.Linear, out_features="4")])
def test_a_mistake_in_a_candidate_is_no_refusal(candidate: Any) -> None:
    with pytest.raises(TypeError):
        Space(base, [Operator("one", "1", {"new": candidate})], inputs=[4])
