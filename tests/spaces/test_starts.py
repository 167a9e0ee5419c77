"""What new modules start from: the seed, the place of the space in its problem's module, and the node."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import mlotool
from mlotool.config.building import build_module, derived_seed
from mlotool.spaces import Operator, Space


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


def test_a_space_that_is_the_module_starts_as_without_a_place() -> None:
    seed = derived_seed(mlotool.compose("plain", ["logger=csv"]).seed, "module", "classifier")
    assert torch.equal(weight(module_of(described("only"))), weight(space(seed=seed)))
