"""A package as a user writes one, with each mistake in a function of its own; and the recipe that uses it."""

from pathlib import Path

MODELS = '''\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, inputs=64, outputs=10):
        super().__init__()
        self.flatten = nn.Flatten()
        self.layer = nn.Linear(inputs, outputs)

    def forward(self, x):
        return self.layer(self.flatten(x))


class NoParameters(nn.Module):
    def forward(self, x):
        return x.flatten(1)[:, :10]


class BadConstructor(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(self.width, 10)

    def forward(self, x):
        return self.layer(x)


class Normed(Net):
    """Its statistics move, it counts its calls and draws random numbers."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(10)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(self.norm(super().forward(x)))


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LazyLinear(10)

    def forward(self, x):
        return self.layer(x.flatten(1))
'''

LOSSES = '''\
import torch
import torch.nn.functional as F


def good(batch, *, model):
    return F.cross_entropy(model(batch["input"]), batch["target"])


def vector(batch, *, model):
    return F.cross_entropy(model(batch["input"]), batch["target"], reduction="none")


def nothing(batch, *, model):
    good(batch, model=model)


def integer(batch, *, model):
    return (model(batch["input"]).argmax(1) != batch["target"]).sum()


def no_role(batch):
    return batch["input"].mean()


def positional(batch, model):
    return good(batch, model=model)


def in_place(batch, *, model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    return good(batch, model=model)


def wrong_key(batch, *, model):
    return F.cross_entropy(model(batch["image"]), batch["label"])


def bad_metric(batch, *, model):
    from mlotool import LossOutput
    logits = model(batch["input"])
    return LossOutput(F.cross_entropy(logits, batch["target"]), {"right": logits.argmax(1) == batch["target"]})


calls = 0


def third_time(batch, *, model):
    """Fails at the third step, not in the first evaluations."""
    global calls
    calls += 1
    if calls > 3:
        raise RuntimeError("the third time is too much")
    return good(batch, model=model)


def weighted(batch, *, model, weigher):
    losses = F.cross_entropy(model(batch["input"]), batch["target"], reduction="none")
    return (weigher(losses.detach().unsqueeze(1)) * losses).mean()
'''

DATA = '''\
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset


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


class FloatTargets(Data):
    def split(self, name):
        inputs, targets = samples()
        return Dicts(inputs, targets.float())


class NotANumber(Data):
    def split(self, name):
        inputs, targets = samples()
        return Dicts(torch.full_like(inputs, float("nan")), targets)


class OtherKeys(Data):
    def split(self, name):
        class Others(Dicts):
            def __getitem__(self, index):
                return {"image": self.inputs[index], "label": self.targets[index]}
        return Others(*samples())


class OtherVal(Data):
    """Its val split holds other samples than train."""

    def split(self, name):
        class Others(Dicts):
            def __getitem__(self, index):
                return {"input": self.inputs[index]}
        return Others(*samples()) if name == "val" else super().split(name)


class NoSplits:
    num_classes = 10

    def split(self, name):
        return Dicts(*samples())


class SplitFails(Data):
    def split(self, name):
        raise FileNotFoundError(f"no folder images/{name}")


class EmptyVal(Data):
    def split(self, name):
        return Dicts(*samples(0 if name == "val" else 40))


class Iterable(Data):
    def split(self, name):
        class Endless(IterableDataset):
            def __iter__(self):
                yield {"input": torch.zeros(1, 8, 8), "target": 0}
        return Endless()


class ItemFails(Data):
    def split(self, name):
        class Failing(Dicts):
            def __getitem__(self, index):
                return self.missing[index]
        return Failing(*samples())


class ItemFailsLater(Data):
    """Only one sample is broken."""

    def split(self, name):
        class Failing(Dicts):
            def __getitem__(self, index):
                if index == 39 and name == "train":
                    raise ValueError("sample 39 is broken")
                return super().__getitem__(index)
        return Failing(*samples())


class Unequal(Data):
    def split(self, name):
        class Growing(Dicts):
            def __getitem__(self, index):
                return {"input": torch.zeros(1, 8, 8 + index), "target": 0}
        return Growing(*samples())


class Objects(Data):
    def split(self, name):
        class Strange(Dicts):
            def __getitem__(self, index):
                return {"input": object(), "target": 0}
        return Strange(*samples())


class BadConstructor(Data):
    def __init__(self, root="images"):
        self.files = open(f"{root}/list.txt").read()
'''

OPTIM = """\
import torch


class StepFails(torch.optim.SGD):
    def step(self, closure=None):
        raise ZeroDivisionError("no step")


class BadScheduler(torch.optim.lr_scheduler.LRScheduler):
    def __init__(self, optimizer, every):
        self.every = 1 / every
        super().__init__(optimizer)


class SchedulerFails(torch.optim.lr_scheduler.LRScheduler):
    def get_lr(self):
        if self.last_epoch > 0:
            raise KeyError("rate")
        return [group["lr"] for group in self.optimizer.param_groups]
"""

ANALYSES = """\
def good(batches, *, model):
    return {"size": sum(len(batch["target"]) for batch in batches)}


def failing(batches, *, model):
    for batch in batches:
        raise LookupError("no such layer")
"""

METRICS = '''\
import torch


def top(module, batch, *, k=2):
    best = module(batch["input"]).topk(k, dim=1).indices
    return {f"top{k}": (best == batch["target"][:, None]).any(1).float()}


def square(module, batch):
    return {"square": torch.zeros(3, 3)}


def nothing(module, batch):
    pass


def failing(module, batch):
    return {"x": module(batch["picture"])}


def modes(module, batch):
    """Must be in eval mode, without gradients."""
    return {"gradient": torch.tensor(float(torch.is_grad_enabled()))}
'''

SOURCES = {
    "__init__": "",
    "models": MODELS,
    "losses": LOSSES,
    "data": DATA,
    "optim": OPTIM,
    "analyses": ANALYSES,
    "metrics": METRICS,
    "broken": "def loss(batch, *, model)\n    return 0\n",
    "importing": "import numpy\nimport no_such_module_at_all\n\n\ndef loss(batch, *, model):\n    return 0\n",
}

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
