"""What upper problems return in the losses below: with the losses of the samples, and at no cost to the training."""

import random
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import mlotool
from mlotool.models import WeightNet
from mlotool.program import Graph, Problem, Program, Schedule, Stream
from mlotool.program.outputs import watched_outputs

SAMPLES = {"x": torch.linspace(-2, 3, 32)[:, None].double(), "y": torch.linspace(-1, 1, 32)[:, None].double()}


class Rows:
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: tensor[index] for name, tensor in SAMPLES.items()}


class Many(nn.Module):
    """Returns a dict, and has a method that returns a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"gain": self.scale * x.squeeze(1), "all": self.scale.expand(3, 2)}

    def pair(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.scale * x, x.long()


def errors(batch: Any, model: Any) -> Tensor:
    return (model(batch["x"]) - batch["y"]).square().squeeze(1)


def weighted(batch: Any, *, model: Any, weigher: Any, normalize: bool) -> Tensor:
    losses = errors(batch, model)
    weight = weigher(losses.detach()[:, None]).squeeze(1)
    # Code of a user's draws where it likes.
    random.random(), numpy.random.rand()
    return (weight * losses).sum() / weight.sum() if normalize else (weight * losses).mean()


def mixed(batch: Any, *, model: Any, weigher: Any) -> Tensor:
    outputs, (first, _) = weigher(batch["x"]), weigher.method("pair", batch["x"])
    outputs["gain"].mul_(2.0)
    return (outputs["gain"] * errors(batch, model)).mean() + outputs["all"].sum() + first.mean()


def make(loss: Any, module: nn.Module) -> Program:
    torch.manual_seed(0)
    layers = [nn.Linear(1, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1)]
    lower = Problem(
        "w",
        nn.Sequential(*layers).double(),
        loss,
        roles={"model": "w", "weigher": "u"},
        stream=Stream(Rows(), 8, seed=1),
        optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.9),
        hypergradient=mlotool.Implicit(mlotool.Identity(), product="finite_difference"),
    )
    upper = Problem(
        "u",
        module.double(),
        lambda batch, *, model: errors(batch, model).mean(),
        roles={"model": "w"},
        stream=Stream(Rows(), 8, seed=2),
        optimizer=partial(torch.optim.Adam, lr=0.01),
    )
    return Program([upper, lower], Graph({"u": ["w"]}, {"w": ["u"]}))


@pytest.mark.filterwarnings("ignore:problems.w.hypergradient. found products by finite differences")
@pytest.mark.parametrize("normalize", [False, True])
def test_a_value_a_sample_tells_the_sample_s_loss(normalize: bool) -> None:
    program = make(partial(weighted, normalize=normalize), WeightNet(5))
    Schedule(program).tick()
    model = program.problems["w"].module
    model[2].p = 0.0  # type: ignore[union-attr, index, assignment]
    batch = program.problems["w"].stream.last()  # type: ignore[union-attr]
    [output] = watched_outputs(program, "w")
    known = errors(batch, program.problems["w"].pure(None, None)).detach()
    weight = program.problems["u"].module(known[:, None]).squeeze(1).detach()
    assert (output.problem, output.name) == ("u", "output") and output.losses is not None
    torch.testing.assert_close(output.values, weight)
    total = (weight * known).sum() / weight.sum()
    expected = 8 * (known - total) / weight.sum() if normalize else known
    torch.testing.assert_close(output.losses, expected)


def test_dicts_tuples_and_methods_have_names() -> None:
    program = make(mixed, Many())
    Schedule(program).tick()
    seen = {output.name: output for output in watched_outputs(program, "w")}
    assert {name: (len(x.values), x.losses is None) for name, x in seen.items()} == {
        "output_gain": (8, False),
        "output_all": (6, True),
        "pair_0": (8, False),
    }
    assert seen["pair_0"].losses is not None
    # Its mean is a term of the loss: each derivative is 1/8.
    torch.testing.assert_close(seen["pair_0"].losses, torch.ones(8, dtype=torch.float64))


@pytest.mark.filterwarnings("ignore:problems.w.hypergradient. found products by finite differences")
def test_looks_change_no_bit_of_the_training() -> None:
    def train(looks: bool) -> list[Any]:
        random.seed(0), numpy.random.seed(0), torch.manual_seed(3)
        program = make(partial(weighted, normalize=False), WeightNet(5))
        schedule = Schedule(program)
        for _ in range(6):
            schedule.tick()
            if looks:
                watched_outputs(program, "w")
        tensors = [x for problem in program.problems.values() for x in problem.module.state_dict().values()]
        return [*tensors, torch.rand(1), torch.tensor([random.random(), numpy.random.rand()])]

    assert all(map(torch.equal, train(looks=True), train(looks=False)))
