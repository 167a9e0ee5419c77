"""What a base may return: what torch opens into tensors; a dataclass only as a leaf."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mlotool.core.errors import ConfigError, InfeasibleModelError
from mlotool.spaces import Operator, Space


@dataclass
class Output:
    logits: Tensor
    hidden: Tensor


class Named(NamedTuple):
    logits: Tensor
    hidden: Tensor


class Net(nn.Module):
    def __init__(self, kind: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(4, 4), kind

    def forward(self, x: Tensor) -> Any:
        h = self.layer(x)
        return self.kind(logits=h, hidden=torch.relu(h))


class Nested(Net):
    def forward(self, x: Tensor) -> Any:
        return {"all": (super().forward(x),)}


class Read(nn.Module):
    def __init__(self, kind: Callable[..., Any]) -> None:
        super().__init__()
        self.net = Net(kind)

    def forward(self, x: Tensor) -> Any:
        return self.net(x).logits * 2


def widths() -> list[Operator]:
    return [Operator("layer", "layer", {"same": None, "wide": partial(nn.Linear, out_features=6)})]


@pytest.mark.parametrize("mode", [nullcontext, FakeTensorMode])
@pytest.mark.parametrize("base", [partial(Net, Output), partial(Nested, Output)])
@pytest.mark.parametrize("mutates", [False, True])
def test_a_dataclass_is_refused_by_name(mode: Callable[[], Any], base: Callable[[], nn.Module], mutates: bool) -> None:
    words = r"base: its forward returns Output, a dataclass.*; expected tensors.*Return a dict.*leaves: \['\.'\]"
    with mode(), pytest.raises(ConfigError, match=words):
        Space(base, widths() if mutates else [], inputs=[4])


def test_a_dataclass_of_a_leaf_is_refused_where_it_is_returned() -> None:
    with pytest.raises(ConfigError, match="its forward returns Output, a dataclass"):
        Space(lambda: nn.Sequential(Net(Output)), inputs=[4], leaves=["0"])


@pytest.mark.parametrize("leaves", [[], ["net"]])
def test_a_dataclass_that_the_forward_reads_itself(leaves: list[str]) -> None:
    space, x = Space(partial(Read, Output), inputs=[4], leaves=leaves), torch.randn(3, 4)
    layer = space.get_submodule("net.layer")
    assert torch.equal(space(x), layer(x) * 2)


def test_a_whole_model_may_return_a_dataclass() -> None:
    found = Space(partial(Net, Output), inputs=[4], leaves=["."])(torch.randn(3, 4))
    assert type(found) is Output and found.logits.shape == (3, 4)


@pytest.mark.parametrize("kind", [Named, dict])
def test_named_tuples_and_dicts_are_opened(kind: Callable[..., Any]) -> None:
    assert type(Space(partial(Net, kind), inputs=[4])(torch.randn(3, 4))) is kind
    with pytest.raises(InfeasibleModelError, match="the model returns"):
        Space(partial(Net, kind), widths(), inputs=[4], decisions={"layer_0": "wide"})
