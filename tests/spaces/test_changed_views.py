"""What changes a view in place changes the tensor: mutators would not see it, so it is refused, with the nodes."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlotool.core.errors import ConfigError, InfeasibleModelError
from mlotool.spaces import Branch, Input, Insert, Operator, Space


class Block(nn.Module):
    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.relu = nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU(inplace=True)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        self.change(h)
        return self.second(h)  # type: ignore[no-any-return]


class ByLayer(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        self.relu(h[:, :2])
        return self.second(h)  # type: ignore[no-any-return]


class Outer(nn.Module):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.block = block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)  # type: ignore[no-any-return]


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda h: h.view(-1, 4),
    "transpose": lambda h: h.transpose(0, 1),
    "chunk": lambda h: h.chunk(2, 1)[0],
    "getitem": lambda h: h[:, :2],
    "expand": lambda h: h.expand(2, 4),
    "unbind": lambda h: h.unbind(1)[0],
    "detach": lambda h: h.detach(),
    "T": lambda h: h.T,
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("change", [lambda v: v.relu_(), lambda v: F.relu(v, inplace=True)])
def test_a_view_that_is_changed_is_refused(view: str, change: Callable[[Tensor], Tensor]) -> None:
    base = partial(Outer, partial(Block, lambda h: change(VIEWS[view](h))))
    with pytest.raises(ConfigError) as found:
        Space(base, [Insert("new", "block.second", {"none": None})], inputs=[4])
    assert "changes in place what 'block.first' returns, which 'block.second' reads afterwards" in str(found.value)
    assert "leaves: ['block']" in str(found.value)
    insert = Insert("new", "block", {"none": None, "tanh": nn.Tanh})
    assert Space(base, [insert], inputs=[4], leaves=["block"], decisions={"new_0": "tanh"}).nodes


def test_a_layer_that_changes_a_view_is_refused_with_the_module_around_it() -> None:
    with pytest.raises(
        ConfigError, match=r"node 'block.relu' changes in place what 'block.first'.*leaves: \['block'\]"
    ):
        Space(partial(Outer, partial(ByLayer, abs)), [Insert("new", "block.second", {"none": None})], inputs=[4])


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.relu = nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.relu(torch.flatten(self.first(x), 1)))  # type: ignore[no-any-return]


class ByMethod(Flat):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.flatten(self.first(x), 1).relu_()
        return self.second(h)  # type: ignore[no-any-return]


@pytest.mark.parametrize("base", [Flat, ByMethod])
def test_a_view_that_alone_is_read_may_be_changed(base: Callable[[], nn.Module]) -> None:
    activation = Operator("kind", {"type": "ReLU" if base is Flat else "relu_"}, {"keep": None, "tanh": nn.Tanh})
    x = torch.randn(3, 4)
    for name, function in {"keep": torch.relu, "tanh": torch.tanh}.items():
        space = Space(base, [activation], inputs=[4], decisions={"kind_0": name})
        assert torch.equal(space(x), space.second(function(space.first(x))))


def test_what_is_changed_through_a_view_is_no_source() -> None:
    class Later(Flat):
        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            k = self.relu(h + 1)
            h.view(-1, 4).relu_()
            return self.second(k)  # type: ignore[no-any-return]

    reads = Input("reads", "second", {"type": "Linear"})
    assert Space(Later, [reads], inputs=[4]).decisions["reads_0"].candidates == (0,)


def test_a_branch_that_returns_what_is_changed_afterwards_is_infeasible() -> None:
    beside = Branch("beside", {"type": "relu_"}, {"same": nn.Identity})
    with pytest.raises(InfeasibleModelError, match="node ':relu_' changes in place what 'beside_0' returns"):
        Space(ByMethod, [beside], inputs=[4])
