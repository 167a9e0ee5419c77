"""A base that makes decisions of its own, below mutators."""

import torch
from torch import Tensor, nn

from mlotool.spaces import Operator, Repeat, Space, choose, deciding


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width = choose("width", [4, 8])
        self.first = nn.Linear(2, width)
        self.second = nn.Linear(width, width)
        self.last = nn.Linear(width, 3)

    def forward(self, values: Tensor) -> Tensor:
        return self.last(torch.relu(self.second(self.first(values))))


MUTATORS = [
    Repeat("depth", "second", [1, 3]),
    Operator("activation", {"type": "relu"}, {"relu": None, "tanh": nn.Tanh}),
]


def test_both_are_asked_for() -> None:
    space = Space(Net, MUTATORS, inputs=[2], decisions={"width": 8, "depth_0": 3})
    assert list(space.decisions) == ["width", "depth_0", "activation_0"]
    sizes = [tuple(each.weight.shape) for each in space.modules() if isinstance(each, nn.Linear)]
    assert sorted(sizes) == [(3, 8), (8, 2), (8, 8), (8, 8), (8, 8)]
    with deciding({"width": 8, "depth_0": 3}) as decisions:
        Space(Net, MUTATORS, inputs=[2])
    assert decisions.values == {"width": 8, "depth_0": 3, "activation_0": "relu"}


def test_copies_start_apart_and_by_the_seed_alone() -> None:
    def weights(**decisions: str | int) -> dict[str, Tensor]:
        torch.manual_seed(3)
        return dict(Space(Net, MUTATORS, inputs=[2], decisions=decisions).named_parameters())

    one, other = weights(depth_0=3), weights(depth_0=3, activation_0="tanh")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    copies = [tensor for name, tensor in one.items() if name.endswith("second.weight")]
    assert len(copies) == 3
    assert not any(torch.equal(copies[i], copies[j]) for i in range(3) for j in range(i))


class Candidate(nn.Module):
    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.layer = nn.Linear(in_features, out_features)
        self.act = choose("act", {"relu": nn.ReLU, "tanh": nn.Tanh})()

    def forward(self, values: Tensor) -> Tensor:
        return self.act(self.layer(values))  # type: ignore[no-any-return]


def test_a_candidate_that_chooses_has_one_answer_for_its_places_and_copies() -> None:
    def base() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))

    mutators = [Operator("own", {"type": "Linear"}, {"own": Candidate}), Repeat("more", "1", [3])]
    space = Space(base, mutators, inputs=[4], decisions={"act": "tanh"})
    assert {name: each.value for name, each in space.decisions.items()}["act"] == "tanh"
    assert sum(isinstance(each, nn.Tanh) for each in space.modules()) == 5
    assert not any(isinstance(each, nn.ReLU) for each in space.modules())
    assert Space(base, mutators, inputs=[4]).decisions["act"].value == "relu"
