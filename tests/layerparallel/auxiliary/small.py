"""Small stacks in float64, and the programs that train them."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mlotool.hypergradient import Identity, Implicit
from mlotool.layerparallel import Auxiliary
from mlotool.program import Graph, Problem, Program, Schedule, Stream

Batch = Mapping[str, Tensor]
sgd = partial(torch.optim.SGD, lr=0.05)
KINDS: dict[str, dict[str, Any]] = {
    "penalty": {},
    "lagrangian": {"method": "lagrangian"},
    "auxnet": {"variables": "auxnet", "auxnet_lr": 0.01},
    "chain": {"variables": "auxnet", "auxnet_lr": 0.01, "auxnet_gradient": "chain", "distillation_steps": 2},
    "recursive": {"variables": "recursive", "auxnet_lr": 0.01, "auxnet_optimizer": "adam"},
    "mean": {"reduction": "mean", "lambda_lr": None, "beta": {"start": 1.0, "factor": 2.0, "every": 2}},
}


class Rows:
    """Twelve samples of three features and a target, with their numbers."""

    def __init__(self, size: int = 12, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.input = torch.randn(size, 3, dtype=torch.float64, generator=generator)
        self.target = torch.randn(size, 2, dtype=torch.float64, generator=generator)

    def __len__(self) -> int:
        return len(self.input)

    def __getitem__(self, index: int) -> Batch:
        return {"input": self.input[index], "target": self.target[index], "index": torch.tensor(index)}


def stack(*, norm: bool = False, dropout: float = 0.0, widths: tuple[int, ...] = (5, 5, 4, 4)) -> nn.Sequential:
    """Return blocks of a linear layer and tanh, and a last linear layer, from 3 to 2 features."""
    torch.manual_seed(1)
    blocks: list[nn.Module] = []
    last = 3
    for width in widths:
        normed = [nn.BatchNorm1d(width)] if norm else []
        noisy = [nn.Dropout(dropout)] if dropout else []
        blocks.append(nn.Sequential(nn.Linear(last, width), *normed, nn.Tanh(), *noisy))
        last = width
    return nn.Sequential(*blocks, nn.Linear(last, 2)).double()


def squared_error(batch: Batch, *, model: Any) -> Tensor:
    return (model(batch["input"]) - batch["target"]).square().sum(1).mean()


def alone(parallel: Auxiliary | None, module: nn.Module | None = None, **settings: Any) -> Program:
    """Return a program of one problem `net`."""
    settings = {"optimizer": sgd, "stream": Stream(Rows(), 4, seed=1), "loss": squared_error, **settings}
    loss = settings.pop("loss")
    net = Problem("net", module or stack(), loss, roles={"model": "net"}, parallel=parallel, **settings)
    return Program([net], Graph())


class Weigher(nn.Module):
    """One weight a feature of the target."""

    def __init__(self) -> None:
        super().__init__()
        self.raw = nn.Parameter(torch.tensor([0.3, -0.2], dtype=torch.float64))

    def forward(self) -> Tensor:
        return self.raw


def weighted(batch: Batch, *, model: Any, weigher: Any) -> Tensor:
    errors = (model(batch["input"]) - batch["target"]).square()
    return (errors * torch.sigmoid(weigher())).sum(1).mean()


def reweighted(parallel: Auxiliary | None, module: nn.Module | None = None, **settings: Any) -> Program:
    """Return a program of `net` and of what weighs its loss."""
    hypergradient = Implicit(Identity(), "finite_difference")
    settings = {"optimizer": sgd, "stream": Stream(Rows(), 4, seed=1), "hypergradient": hypergradient, **settings}
    roles = {"model": "net", "weigher": "weigher"}
    net = Problem("net", module or stack(), weighted, roles=roles, parallel=parallel, **settings)
    how: dict[str, Any] = {"stream": Stream(Rows(8, seed=5), 4, seed=2), "optimizer": partial(torch.optim.SGD, lr=0.1)}
    weigher = Problem("weigher", Weigher(), squared_error, roles={"model": "net"}, **how)
    return Program([net, weigher], Graph({"weigher": ["net"]}, {"net": ["weigher"]}))


def auxiliary(**settings: Any) -> Auxiliary:
    """Return the method on three stages, cut before the second and the fourth block, its seed drawn from 3."""
    torch.manual_seed(3)
    return Auxiliary(**{"stages": 3, "cut": ["1", "3"], "beta": 4.0, "reduction": "sum", "lambda_lr": 0.02, **settings})


def follow(program: Program, num_ticks: int) -> list[dict[str, float]]:
    """Take ticks; return the statistics after each."""
    schedule, found = Schedule(program), []
    for _ in range(num_ticks):
        schedule.tick()
        found.append(dict(program.statistics()))
    return found
