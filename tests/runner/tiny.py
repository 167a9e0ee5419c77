"""A two-level program of a few hundred parameters, and the config that goes with it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.nn import functional

from mlotool import Graph, Identity, Implicit, LossOutput, Problem, Program, Stream

NUM_CLASSES, NUM_FEATURES = 3, 4


class Blobs:
    """Samples of three Gaussian blobs, with an integer target."""

    def __init__(self, size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.target = torch.randint(NUM_CLASSES, (size,), generator=generator)
        centers = torch.eye(NUM_CLASSES, NUM_FEATURES) * 2
        self.input = centers[self.target] + torch.randn(size, NUM_FEATURES, generator=generator)

    def __len__(self) -> int:
        return len(self.target)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input": self.input[index], "target": self.target[index]}

    def __getitems__(self, indices: Any) -> dict[str, Tensor]:
        return {"input": self.input[indices], "target": self.target[indices]}


class Data:
    splits = ("train", "meta", "val", "test")
    num_classes = NUM_CLASSES

    def __init__(self) -> None:
        sizes = {"train": 40, "meta": 16, "val": 20, "test": 24}
        self._splits = {name: Blobs(size, seed) for seed, (name, size) in enumerate(sizes.items())}

    def split(self, name: str) -> Blobs:
        return self._splits[name]


class ClassWeights(nn.Module):
    """One weight a class."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(NUM_CLASSES))

    def forward(self, target: Tensor) -> Tensor:
        return torch.sigmoid(self.logits)[target]


def upper_loss(batch: Mapping[str, Tensor], *, model: Any) -> Tensor:
    return functional.cross_entropy(model(batch["input"]), batch["target"])


def lower_loss(batch: Mapping[str, Tensor], *, model: Any, weigher: Any) -> LossOutput:
    logits = model(batch["input"])
    losses = functional.cross_entropy(logits, batch["target"], reduction="none")
    correct = (logits.argmax(1) == batch["target"]).float().mean()
    return LossOutput((losses * weigher(batch["target"])).mean(), {"accuracy": correct})


@dataclass
class Analysis:
    function: Callable[..., dict[str, Tensor]]
    roles: dict[str, str]
    split: str = "train"
    batch_size: int = 16


@dataclass
class Built:
    program: Program
    data: Any
    analyses: dict[str, Analysis] = field(default_factory=dict)
    metrics: dict[str, Callable[..., Any]] = field(default_factory=dict)
    decisions: dict[str, Any] = field(default_factory=dict)
    callbacks: list[Any] = field(default_factory=list)
    loggers: list[Any] = field(default_factory=list)


def make_built(
    loss: Callable[..., Any] = lower_loss,
    optimizer: Any = None,
    *,
    hypergradient: Any = None,
    shuffle: bool = True,
    between: Sequence[nn.Module] = (),
    **settings: Any,
) -> Built:
    """Build the program; `between` comes after the first layer, and `settings` go to the lower problem."""
    data = Data()
    torch.manual_seed(0)
    layers = [nn.Linear(NUM_FEATURES, 16), *between, nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, NUM_CLASSES)]
    classifier = nn.Sequential(*layers)
    lower = Problem(
        "classifier",
        classifier,
        loss,
        roles={"model": "classifier", "weigher": "weights"},
        stream=Stream(data.split("train"), 8, seed=1, shuffle=shuffle),
        optimizer=optimizer or partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        hypergradient=hypergradient or Implicit(Identity(), product="finite_difference"),
        **settings,
    )
    upper = Problem(
        "weights",
        ClassWeights(),
        upper_loss,
        roles={"model": "classifier"},
        stream=Stream(data.split("meta"), 8, seed=2),
        optimizer=partial(torch.optim.Adam, lr=0.01),
    )
    graph = Graph(upper_to_lower={"weights": ["classifier"]}, lower_to_upper={"classifier": ["weights"]})
    return Built(Program([upper, lower], graph), data)


CONFIG = """
name: tiny
seed: 0
problems: {weights: {}, classifier: {}}
evaluate: {problem: classifier, metrics: [accuracy, cross_entropy], splits: {val: 10, test: end}, batch_size: 7}
objective: val/accuracy
runner: {max_ticks: 20, ticks_per_chunk: 8, log_every: 5, accelerator: cpu, tf32: false, deterministic: true,
  num_threads: null, checkpoint: true, checkpoint_seconds: 30.0, keep_checkpoints: 1, early_stopping_patience: null,
  progress_bar: false, report: false}
logger: {mode: offline, wandb: false, tensorboard: false, project: mlotool}
debug: {limit_ticks: null, limit_samples: null}
"""


def make_config(**changes: Any) -> Any:
    """Return the config with dotted keys changed: `make_config(**{"runner.max_ticks": 5})`."""
    config = OmegaConf.create(CONFIG)
    for key, value in changes.items():
        OmegaConf.update(config, key, value, merge=False)
    return config
