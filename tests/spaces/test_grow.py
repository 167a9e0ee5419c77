"""Spaces that grow, and what they grow by: branches, nodes on edges, edges."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from mlotool.core.errors import ConfigError, InfeasibleModelError
from mlotool.models import ResNet, SharedWeightNetwork, SharedWeightUnit
from mlotool.spaces import Branch, Grow, Insert, Link, Operator, Space, Split
from mlotool.spaces.decisions import MAX_DECISIONS

UNITS = {name: partial(SharedWeightUnit, name) for name in ("tanh", "inverse", "gaussian")}


def agnostic(decisions: Mapping[str, Any], steps: int = 4) -> Space:
    mutators = {
        "none": None,
        "link": Link,
        "split": partial(Split, candidates=UNITS),
        "activation": partial(Operator, candidates=UNITS),
    }
    grow = Grow("grow", {"type": "SharedWeightUnit"}, mutators, steps)
    leaves = ["hidden.*", "outputs.*"]
    return Space(lambda: SharedWeightNetwork([4], 2), [grow], inputs=[4], leaves=leaves, decisions=decisions)


def path_level(decisions: Mapping[str, Any]) -> Space:
    torch.manual_seed(0)
    convolutions = {f"conv{size}": partial(nn.Conv2d, kernel_size=size, padding=size // 2) for size in (1, 5)}
    mutators = {
        "none": None,
        "branch": partial(Branch, candidates=convolutions),
        "deepen": partial(Insert, candidates={"conv3": partial(nn.Conv2d, kernel_size=3, padding=1)}),
    }
    grow = Grow("grow", {"type": "Conv2d"}, mutators, steps=3)
    return Space(lambda: ResNet(8, 10, [1, 8, 8], width=4), [grow], inputs=[1, 8, 8], decisions=decisions, seed=1)


def test_nothing_is_grown_at_first() -> None:
    torch.manual_seed(0)
    base, x = ResNet(8, 10, [1, 8, 8], width=4), torch.randn(2, 1, 8, 8)
    space = path_level({})
    assert list(space.decisions) == ["grow_0", "grow_1", "grow_2"]
    assert torch.equal(space(x), base(x))


def test_branches_compute_what_torch_computes() -> None:
    space, x = path_level({"grow_0": "branch", "grow_0_place": 2, "grow_0_branch_0": "conv5"}), torch.randn(3, 1, 8, 8)
    torch.manual_seed(0)
    base = ResNet(8, 10, [1, 8, 8], width=4)
    wide = space.get_submodule("grow_0_branch_0")
    base.stages[0][0].convolution_2.register_forward_hook(lambda layer, given, result: result + wide(*given))
    assert wide.kernel_size == (5, 5)
    assert torch.allclose(space.eval()(x), base.eval()(x), rtol=0, atol=1e-6)


def test_models_start_alike_where_they_are_alike() -> None:
    decisions: dict[str, Any] = {"grow_0": "branch", "grow_0_place": 2, "grow_1": "deepen"}
    one, other = path_level(decisions).state_dict(), path_level({**decisions, "grow_0_branch_0": "conv5"}).state_dict()
    assert one.keys() == other.keys()
    assert [key for key in one if not torch.equal(one[key], other[key]) or one[key].shape != other[key].shape] == [
        "grow_0_branch_0.weight",
        "grow_0_branch_0.bias",
    ]


def test_a_network_of_one_weight_grows_nodes_edges_and_activations() -> None:
    decisions = {
        "grow_0": "split",  # hidden.0 reads inputs 0 and 2: a node on the edge from input 2
        "grow_0_place": 0,
        "grow_0_split_0": "inverse",
        "grow_0_split_0_input": 1,
        "grow_1": "link",  # hidden.1 reads one more: the node that was put, which comes before it
        "grow_1_place": 2,
        "grow_1_link_0": 2,
        "grow_2": "activation",
        "grow_2_place": 4,
        "grow_2_activation_0": "tanh",
    }
    space = agnostic(decisions)
    assert [each.inputs for each in space.nodes if each.id == "hidden.0"] == [(":cat", "grow_0_split_0")]
    x, w = torch.randn(7, 4), 0.7
    with torch.no_grad():
        space.get_parameter("weight").fill_(w)
    read = {each.id: each.inputs for each in space.nodes}["hidden.1"]
    new = -w * x[:, 2]
    given = {":cat": x[:, 0], ":cat#2": x[:, 1], ":cat#3": x[:, 2], ":cat#4": x[:, 3], "grow_0_split_0": new}
    given["hidden.0"] = w * (x[:, 0] + new)
    hidden_1 = w * sum(given[name] for name in read)
    assert read[:2] == (":cat#2", ":cat#4") and len(read) == 3
    expected = torch.stack([w * given["hidden.0"], torch.tanh(w * hidden_1)], dim=1)
    assert torch.allclose(space(x), expected, atol=1e-6)


@pytest.mark.parametrize(("join", "atol"), [("mean", 1e-6), ("concat", 1e-6)])
def test_branches_join_as_they_are_told(join: str, atol: float) -> None:
    branch = Branch("branch", "0", {"linear": nn.Linear}, join, nn.Linear if join == "concat" else None)
    space, x = Space(partial(nn.Sequential, nn.Linear(3, 4)), [branch], inputs=[3]), torch.randn(5, 3)
    layers = dict(space.named_modules())
    parts = [layers["0"](x), layers["branch_0"](x)]
    expected = sum(parts) / 2 if join == "mean" else layers["branch_0_project"](torch.cat(parts, dim=1))
    assert torch.allclose(space(x), expected, atol=atol)


def linears(count: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(count)))


def test_a_place_that_growth_has_taken_makes_no_model() -> None:
    replace = partial(Operator, candidates={"tanh": nn.Tanh})
    grow = Grow("grow", {"type": "Linear"}, {"none": None, "replace": replace}, 2)
    make = partial(Space, partial(linears, 1), [grow], inputs=[2])
    with pytest.raises(InfeasibleModelError, match="found no place for type 'Linear'"):
        make(decisions={"grow_0": "replace", "grow_1": "replace"})
    with pytest.raises(ConfigError, match="found no place for type 'Conv2d'") as error:
        Space(linears(1), [Grow("grow", {"type": "Conv2d"}, {"replace": replace}, 1)], inputs=[2])
    assert not isinstance(error.value, InfeasibleModelError)


def nested(depth: int, mutators: Mapping[str, Any], steps: int = 1000) -> Grow:
    for _ in range(depth - 1):
        mutators = {"grow": partial(Grow, mutators=mutators, steps=steps)}
    return Grow("grow", {"type": "Linear"}, mutators, steps)


DEEPEN = partial(Insert, candidates={"linear": nn.Linear})
NARROW = partial(Operator, candidates={"linear": nn.Linear, "id": nn.Identity})


@pytest.mark.parametrize(
    "grow", [nested(3, {"none": None, "deepen": DEEPEN}), nested(2, {"operator": NARROW}, steps=60)]
)
def test_a_grow_within_another_is_refused_before_it_takes_minutes(grow: Grow) -> None:
    with pytest.raises(InfeasibleModelError, match=f"found more than {MAX_DECISIONS:,} decisions of one program"):
        Space(linears(2), [grow], inputs=[2])
    assert len(Space(linears(1), [nested(2, {"deepen": DEEPEN}, steps=3)], inputs=[2]).nodes) == 3 + 9
