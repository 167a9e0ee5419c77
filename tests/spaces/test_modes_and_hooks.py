"""What a base's constructor has set beside values: modes, hooks, parametrizations, parameters that do not train."""

from functools import partial
from typing import Self

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from mlotool.core.errors import ConfigError
from mlotool.spaces import Insert, Operator, Repeat, Space


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()

    def forward(self, values: Tensor) -> Tensor:
        return self.drop(self.norm(self.layer(values)))


class Frozen(Block):
    """Its norm stays in evaluation."""

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.norm.eval()
        return self


def blocks(kind: type[Block] = Block) -> nn.Module:
    base = nn.Sequential(kind(), kind())
    base[0].norm.eval()
    base[0].layer.requires_grad_(requires_grad=False)
    return base.train() if kind is Frozen else base


def modes(space: nn.Module) -> dict[str, bool]:
    return {path: each.training for path, each in space.named_modules() if isinstance(each, Block | nn.BatchNorm1d)}


def test_copies_keep_the_mode_and_whether_parameters_train() -> None:
    space = Space(blocks, [Repeat("depth", "*", [3])], inputs=[4])
    layers = dict(space.named_modules())
    for copy in (1, 2):
        assert [layers[f"depth_{place}_{copy}.{place}.norm"].training for place in (0, 1)] == [False, True]
        assert layers[f"depth_0_{copy}.0.drop"].training
        trains = [layers[f"depth_{place}_{copy}.{place}.layer"].weight.requires_grad for place in (0, 1)]
        assert trains == [False, True]


def test_copies_of_leaves_keep_the_mode() -> None:
    space = Space(blocks, [Repeat("depth", "0", [2])], inputs=[4], leaves=["*"])
    copied = space.get_submodule("depth_0_1.0")
    assert copied.training and not copied.norm.training and copied.drop.training


def test_copies_of_copies_and_of_new_modules_keep_the_mode() -> None:
    base = partial(blocks)
    mutators = [
        Operator("norm", "0.norm", {"other": partial(nn.BatchNorm1d, momentum=0.5)}),
        Repeat("one", "0", [2]),
        Repeat("two", "one_0_1.*", [2]),
    ]
    space = Space(base, mutators[:2], inputs=[4])
    assert space.get_submodule("one_0_1.0.norm").momentum == 0.5
    assert modes(space) == {"0": True, "0.norm": False, "1": True, "1.norm": True, "one_0_1.0.norm": False}
    again = Space(base, mutators, inputs=[4])
    assert not again.get_submodule("two_0_1.one_0_1.0.norm").training


def test_a_train_method_is_copied_with_its_block() -> None:
    space = Space(partial(blocks, Frozen), [Repeat("depth", "0", [2])], inputs=[4])
    norm = space.get_submodule("depth_0_1.0.norm")
    for _ in range(2):
        assert not norm.training
        assert space.get_submodule("depth_0_1.0.drop").training
        space.eval()
        space.train()
    assert list(space.state_dict()) == [
        *(f"{block}.{name}" for block in (0, 1, "depth_0_1.0") for name in Block().state_dict())
    ]


def test_new_modules_elsewhere_train() -> None:
    space = Space(blocks, [Insert("more", "0.norm", {"norm": nn.BatchNorm1d})], inputs=[4])
    assert space.get_submodule("more_0").training
    stays = Space(lambda: blocks().eval(), [Insert("more", "0.norm", {"norm": nn.BatchNorm1d})], inputs=[4])
    assert not any(each.training for each in stays.modules())


def doubling() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.register_forward_hook(lambda module, given, result: result * 2)
    return layer


def test_hooks_and_parametrizations_are_copied() -> None:
    space = Space(lambda: nn.Sequential(doubling(), weight_norm(nn.Linear(4, 4))), [Repeat("d", "*", [2])], inputs=[4])
    values = torch.randn(3, 4)
    hooked, normed = space.get_submodule("d_0_1.0"), space.get_submodule("d_1_1.1")
    assert isinstance(hooked, nn.Linear)
    assert torch.equal(hooked(values), 2 * hooked.forward(values))
    assert "parametrizations.weight.original0" in dict(normed.named_parameters())


@pytest.mark.parametrize(
    ("make", "found"), [(doubling, "forward hooks"), (lambda: weight_norm(nn.Linear(4, 4)), "parametrizations")]
)
def test_hooks_and_parametrizations_are_not_replaced_silently(make: partial[nn.Module], found: str) -> None:
    def base() -> nn.Module:
        return nn.Sequential(make(), nn.ReLU())

    text = rf"found {found} of '0', which Linear in its place would not have; expected a new module that has some"
    with pytest.raises(ConfigError, match=text):
        Space(base, [Operator("other", "0", {"plain": nn.Linear})], inputs=[4])
    chain = {"chain": ["0", "1"]}
    with pytest.raises(ConfigError, match=f"found {found} of '1'"):
        Space(base, [Operator("other", chain, {"plain": partial(nn.Linear, 4, 4)})], inputs=[4])
    assert Space(base, [Operator("other", "0", {"own": make})], inputs=[4]).decisions
