"""A space as a file or a copy: pickle and deepcopy."""

import copy
import pickle
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from mlotool.spaces import AbstractMutator, Branch, Insert, ModelGraph, Repeat, Space


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, values: Tensor) -> Tensor:
        values = nn.functional.dropout(self.features(values), training=self.training)
        return nn.functional.gelu(self.second(values), approximate="tanh")[:, :3] * float("inf")

    def features(self, values: Tensor) -> Tensor:
        return torch.relu(self.first(values)) * self.scale


class Doubled(AbstractMutator):
    name = "doubled"

    def mutate(self, graph: ModelGraph) -> None:
        [place] = graph.find("second")
        readers = list(place.nodes[-1].users)
        node = graph.call("doubled_0", torch.add, [place.nodes[-1], place.nodes[-1]])
        for reader in readers:
            graph.connect(reader, node, 0)


MUTATORS: dict[str, list[AbstractMutator]] = {
    "none": [],
    "rewired": [
        Repeat("depth", "first", [3]),
        Branch("branch", "second", {"linear": nn.Linear}),
        Insert("more", "second", {"norm": partial(nn.LayerNorm)}),
    ],
    "called": [Doubled()],
}


WAYS: dict[str, Callable[[Space], Space]] = {
    "pickle": lambda space: pickle.loads(pickle.dumps(space)),
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mutators", MUTATORS)
def test_a_copy_computes_the_same(way: str, mutators: str) -> None:
    space = Space(Net, MUTATORS[mutators], inputs=[4])
    again = WAYS[way](space)
    values = torch.randn(5, 4)
    for mode in (True, False):
        for each in (space, again):
            each.train(mode)
        results = []
        for each in (space, again):
            torch.manual_seed(0)
            results.append(each(values))
        assert torch.equal(*map(torch.nan_to_num, results))
    assert (again.decisions, again.changes, again.nodes) == (space.decisions, space.changes, space.nodes)
    with torch.no_grad():
        next(again.parameters()).zero_()
    assert not torch.equal(next(again.parameters()), next(space.parameters()))
