"""The tiny program with each kind of algorithm, optimizer and schedule: what a checkpoint has to know of them all."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau, StepLR

from mlotool import Graph, Problem, Program, Stream
from mlotool import hypergradient as by
from mlotool.models import PositiveVector
from tests.runner.tiny import Built, Data, make_built


def tiny(algorithm: Callable[[], Any] | None = None, **settings: Any) -> Callable[[], Built]:
    def build() -> Built:
        return make_built(hypergradient=None if algorithm is None else algorithm(), **settings)

    return build


class Episodes:
    """Twelve tasks of four samples each."""

    def __init__(self, split: str) -> None:
        self._split = Data().split(split)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        raise NotImplementedError

    def __getitems__(self, indices: Any) -> Any:
        rows = torch.tensor([[(int(index) + step) % 16 for step in range(4)] for index in indices])
        return {"input": self._split.input[rows], "target": self._split.target[rows]}


def with_tasks() -> Built:
    torch.manual_seed(0)

    def loss(batch: Any, *, model: Any, shared: Any, weight: float = 0.1) -> Any:
        return functional.cross_entropy(model(batch["input"]), batch["target"]) + weight * shared().square().sum()

    lower = Problem(
        "learner",
        nn.Linear(4, 3),
        loss,
        roles={"model": "learner", "shared": "shared"},
        stream=Stream(Episodes("train"), 3, seed=1),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        hypergradient=by.Implicit(by.ConjugateGradient(3, 1e-6, damping=2.0), warm_start=True),
        unroll_steps=2,
        reset_to="initial",
        tasks=3,
    )
    upper = Problem(
        "shared",
        PositiveVector(2),
        partial(loss, weight=1.0),
        roles={"model": "learner", "shared": "shared"},
        stream=Stream(Episodes("meta"), 3, seed=2),
        optimizer=partial(torch.optim.Adam, lr=0.05),
    )
    graph = Graph(upper_to_lower={"shared": ["learner"]}, lower_to_upper={"learner": ["shared"]})
    return Built(Program([upper, lower], graph), Data())


def plateau(optimizer: Any) -> Any:
    return ReduceLROnPlateau(optimizer, mode="max", factor=0.5, patience=0)


NO_EVALUATION = {"evaluate": None, "objective": None}

ADAM = partial(torch.optim.Adam, lr=0.02)
# By name: how it is built, and what it changes in the config.
ALGORITHMS: dict[str, tuple[Callable[[], Built], dict[str, Any]]] = {
    "finite_difference": (tiny(), {}),
    "cg_with_warm_start": (
        tiny(
            lambda: by.Implicit(by.ConjugateGradient(4, 1e-8, damping=2.0), warm_start=True, report_every=2),
            unroll_steps=3,
        ),
        {},
    ),
    "nystrom": (tiny(lambda: by.Implicit(by.Nystrom(rank=3, rho=1.0))), {}),
    "unrolled": (tiny(by.Unrolled, optimizer=ADAM, unroll_steps=4), {}),
    "unrolled_within_a_horizon": (tiny(lambda: by.Unrolled(horizon=2), unroll_steps=5), {}),
    "unrolled_with_kept_graphs": (tiny(lambda: by.Unrolled(remat=False), unroll_steps=3), {}),
    # Tick 7 is within an unroll.
    "unrolled_by_forward_mode": (
        tiny(lambda: by.Unrolled(product="forward"), optimizer=ADAM, unroll_steps=3, remat=["0", "3"]),
        {},
    ),
    "penalty": (tiny(lambda: by.Penalty(multiplier=5.0, growth=0.5, num_steps=2), unroll_steps=2), {}),
    "saba": (tiny(lambda: by.SABA(step_size=0.05), shuffle=False, unroll_steps=2), {}),
    "evolution": (tiny(lambda: by.EvolutionStrategies(num_pairs=2), unroll_steps=2), {}),
    "roll_back": (tiny(roll_back=True, unroll_steps=3), {}),
    "scheduler_of_steps": (tiny(scheduler=partial(CosineAnnealingLR, T_max=20)), {}),
    "scheduler_of_evaluations": (
        tiny(scheduler=partial(StepLR, step_size=2, gamma=0.3), scheduler_interval="evaluation"),
        {},
    ),
    "plateau": (tiny(scheduler=plateau, scheduler_interval="evaluation"), {}),
    "early_stopping": (
        tiny(optimizer=partial(torch.optim.SGD, lr=1e-12)),
        {"runner.early_stopping_patience": 2, "runner.log_every": 7, "runner.max_ticks": 200},
    ),
    "accumulate_batches": (tiny(accumulate_batches=2, gradient_clip_norm=0.5), {}),
    "warmup": (tiny(warmup_steps=6, unroll_steps=2), {"runner.log_every": 4}),
    "tasks": (with_tasks, NO_EVALUATION),
    "objective_of_the_training": (tiny(), {"evaluate": None, "objective": "weights/loss", "runner.log_every": 3}),
}
