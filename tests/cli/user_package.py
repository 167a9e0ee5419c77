"""A package as a user writes one, and the recipe that uses it."""

from pathlib import Path

MODELS = """\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, inputs=64, outputs=10):
        super().__init__()
        self.flatten = nn.Flatten()
        self.layer = nn.Linear(inputs, outputs)

    def forward(self, x):
        return self.layer(self.flatten(x))


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LazyLinear(10)

    def forward(self, x):
        return self.layer(x.flatten(1))
"""

LOSSES = """\
import torch.nn.functional as F


def good(batch, *, model):
    return F.cross_entropy(model(batch["input"]), batch["target"])
"""

DATA = '''\
import torch
from torch.utils.data import Dataset, TensorDataset


def samples(count=40):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 1, 8, 8, generator=generator), torch.arange(count) % 10


class Data:
    """Splits of dicts."""
    num_classes = 10
    splits = ("train", "val")

    def split(self, name):
        return Dicts(*samples())


class Dicts(Dataset):
    def __init__(self, inputs, targets):
        self.inputs, self.targets = inputs, targets

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return {"input": self.inputs[index], "target": self.targets[index], "index": index}


class Pairs(Data):
    """(image, label) pairs, as torchvision has them."""

    def split(self, name):
        return TensorDataset(*samples())
'''

METRICS = '''\
import torch


def top(module, batch, *, k=2):
    best = module(batch["input"]).topk(k, dim=1).indices
    return {f"top{k}": (best == batch["target"][:, None]).any(1).float()}


def modes(module, batch):
    """Must be in eval mode, without gradients."""
    return {"gradient": torch.tensor(float(torch.is_grad_enabled()))}
'''

SOURCES = {"__init__": "", "models": MODELS, "losses": LOSSES, "data": DATA, "metrics": METRICS}

RECIPE = """\
# @package _global_
# A recipe of a user's package.
defaults: [_self_, override /data: null]
name: mine
data: {_target_: mypackage.data.Data}
problems:
  classifier:
    module: {_target_: mypackage.models.Net}
    loss: {_target_: mypackage.losses.good, roles: {model: classifier}}
    stream: {split: train, batch_size: 8}
    optimizer: {_target_: torch.optim.SGD, lr: 0.1}
evaluate: {problem: classifier, metrics: [accuracy], splits: {val: 2}, batch_size: 16}
objective: val/accuracy
objective_mode: max
runner: {max_ticks: 2, log_every: 1, progress_bar: false, report: false, accelerator: cpu}
logger: {wandb: false}
"""


def write_package(folder: Path) -> None:
    """Write `mypackage` and `mine.yaml` into a folder."""
    package = folder / "mypackage"
    package.mkdir()
    for name, source in SOURCES.items():
        (package / f"{name}.py").write_text(source)
    (folder / "mine.yaml").write_text(RECIPE)
