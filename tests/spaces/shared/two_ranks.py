"""Two ranks that run given paths through a shared space, in tests/spaces/shared/test_ranks.py."""

import os
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mlotool import FirstOrder, Graph, Identity, Implicit, Problem, Program, Stream
from mlotool.core.errors import ConfigError
from mlotool.distributed.collectives import Ranks
from mlotool.program import Schedule
from mlotool.runner.process_group import joined
from mlotool.runner.world import World
from mlotool.spaces import FairPaths, Operator, SharedSpace
from mlotool.spaces.shared.path_table import Path as Choice
from mlotool.spaces.shared.paths import AbstractPaths
from tests.over_ranks import over

WIDTH, BATCH, NUM_TICKS = 3, 5, 6
OPTIMIZERS = {
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": partial(torch.optim.Adam, lr=0.05),
}
# By tick and rank, the candidates of the first and the second place. At last none uses `a` at the first.
PATHS = [
    [("a", "a"), ("a", "b")],
    [("a", "b"), ("b", "b")],
    [("b", "a"), ("a", "b")],
    [("b", "b"), ("b", "a")],
    [("b", "a"), ("b", "a")],
    [("b", "b"), ("b", "b")],
]
# Nothing is used by both.
APART = [[("a", "a"), ("b", "b")], [("b", "b"), ("a", "a")]] * (NUM_TICKS // 2)


class Given(AbstractPaths):
    """Paths that are told, one after the other."""

    def __init__(self, paths: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self._paths = iter(paths)

    def forward(self, decisions: Any) -> Choice:
        return dict(zip([each.name for each in decisions], next(self._paths), strict=True))


class Rows:
    """Rows of inputs and targets."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.input, self.target = torch.randn(2, BATCH * NUM_TICKS, WIDTH, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.input)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input": self.input[index], "target": self.target[index]}


def space(paths: AbstractPaths | None) -> SharedSpace:
    """Return two places with two linear layers each."""

    def base() -> nn.Module:
        return nn.Sequential(nn.Tanh(), nn.Tanh())

    # Candidates of one factory would be one layer.
    linears = {name: partial(nn.Linear, WIDTH, WIDTH) for name in "ab"}
    places = Operator("place", {"type": "Tanh"}, linears)
    torch.manual_seed(0)
    return SharedSpace(base, [places], inputs=[WIDTH], seed=1, paths=paths).double()


def loss(batch: Mapping[str, Tensor], *, w: Any) -> Tensor:
    return (w(batch["input"]) - batch["target"]).square().mean()


def build(optimizer: str, paths: AbstractPaths) -> Program:
    stream = Stream(Rows(), BATCH, shuffle=False)
    return Program(
        [Problem("w", space(paths), loss, roles={"w": "w"}, stream=stream, optimizer=OPTIMIZERS[optimizer])], Graph()
    )


def trained(ranks: Ranks, optimizer: str, paths: Sequence[Sequence[tuple[str, str]]]) -> dict[str, Any]:
    """Return parameters and the optimizer's state by tick; batches of 5 are shares of 2 and 3."""
    made = over(ranks, build(optimizer, Given([each[ranks.rank] for each in paths])))
    schedule, found = Schedule(made), []
    problem = made.problems["w"]
    for _ in paths:
        schedule.tick()
        found.append({name: value.detach().clone() for name, value in problem.theta.items()})
    return {"theta": found}


def levels(algorithm: Any) -> Program:
    """Return a program whose upper problem passes through a shared space."""

    def upper_loss(batch: Any, *, w: Any) -> Tensor:
        return loss(batch, w=w)

    def lower_loss(batch: Any, *, w: Any, u: Any) -> Tensor:
        return loss(batch, w=w) * u(batch["input"]).square().mean()

    step, rows = OPTIMIZERS["momentum"], Rows()
    upper = Problem(
        "u", nn.Linear(WIDTH, 1).double(), upper_loss, roles={"w": "w"}, stream=Stream(rows, BATCH), optimizer=step
    )
    lower = Problem(
        "w",
        space(None),
        lower_loss,
        roles={"w": "w", "u": "u"},
        stream=Stream(rows, BATCH),
        optimizer=step,
        hypergradient=algorithm,
    )
    return Program([upper, lower], Graph(lower_to_upper={"w": ["u"]}, upper_to_lower={"u": ["w"]}))


def refusal(ranks: Ranks, algorithm: Any) -> str:
    try:
        over(ranks, levels(algorithm))
    except ConfigError as error:
        return str(error)
    return ""


def main(folder: Path) -> None:
    """Be one of them."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with joined(World.find(os.environ), torch.device("cpu")) as ranks:
        found: dict[str, Any] = {}
        for name in OPTIMIZERS:
            found[name] = trained(ranks, name, PATHS)
            found[f"{name} apart"] = trained(ranks, name, APART)
        fair = over(ranks, build("adam", FairPaths()))
        schedule = Schedule(fair)
        for _ in range(3):
            schedule.tick()
        found["left"] = fair.problems["w"].module.paths.left.clone()
        found["refused"] = refusal(ranks, Implicit(Identity())), refusal(ranks, FirstOrder())
        torch.save(found, folder / f"rank_{ranks.rank}.pt")
