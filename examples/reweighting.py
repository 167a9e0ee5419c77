"""Learned sample weights: a classifier trains on noisy labels, and the weights are learned on a small clean set.

What it shows: two problems, and `mlotool.fit` with an evaluation: the test accuracy is that of the best checkpoint.
Command:       python examples/reweighting.py [TICKS]
It prints:     test accuracy with equal weights 0.56, with learned weights 0.83
"""

import sys

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import mlotool

TICKS = int(sys.argv[1]) if len(sys.argv) > 1 else 600
NUM_TRAIN, NUM_CLASSES, NUM_FEATURES = 500, 4, 20


def blobs(size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw samples around one center per class."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(NUM_CLASSES, (size,), generator=generator)
    centers = 2.5 * torch.eye(NUM_CLASSES, NUM_FEATURES)
    return centers[target] + torch.randn(size, NUM_FEATURES, generator=generator), target


train_input, clean_target = blobs(NUM_TRAIN, seed=1)
is_wrong = torch.rand(NUM_TRAIN, generator=torch.Generator().manual_seed(2)) < 0.4
train_target = torch.where(is_wrong, (clean_target + 1) % NUM_CLASSES, clean_target)
train = [{"input": x, "target": y, "index": i} for i, (x, y) in enumerate(zip(train_input, train_target, strict=True))]
clean = [{"input": x, "target": y} for x, y in zip(*blobs(60, seed=3), strict=True)]
evaluated = {"val": TensorDataset(*blobs(200, seed=4)), "test": TensorDataset(*blobs(2000, seed=5))}


class Weights(torch.nn.Module):
    """One weight per training sample, between 0 and 1."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(torch.zeros(NUM_TRAIN))

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.logits[index].sigmoid()


def weighted_loss(batch, *, model, weights):
    return (weights(batch["index"]) * cross_entropy(model(batch["input"]), batch["target"], reduction="none")).mean()


def plain_loss(batch, *, model):
    return cross_entropy(model(batch["input"]), batch["target"])


def classifier(loss, **roles) -> mlotool.Problem:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(NUM_FEATURES, 64), torch.nn.ReLU(), torch.nn.Linear(64, NUM_CLASSES))
    stream = mlotool.Stream(train, batch_size=100)
    return mlotool.Problem("classifier", module, loss, roles={"model": "classifier", **roles}, stream=stream,
                           optimizer="sgd", lr=0.05, hypergradient="finite_difference" if roles else None)  # fmt: skip


def test_accuracy(program: mlotool.Program, name: str) -> float:
    evaluate = {"problem": "classifier", "metrics": ["accuracy"], "splits": {"val": 50, "test": "end"}}
    result = mlotool.fit(program, TICKS, data=evaluated, evaluate=evaluate, objective="val/accuracy", name=name)
    return result.metrics["test/accuracy"]


if __name__ == "__main__":
    weights = mlotool.Problem("weights", Weights(), plain_loss, roles={"model": "classifier"},
                              stream=mlotool.Stream(clean, batch_size=60), optimizer="adam", lr=0.05)  # fmt: skip
    graph = mlotool.Graph(upper_to_lower={"weights": ["classifier"]}, lower_to_upper={"classifier": ["weights"]})
    reweighted = mlotool.Program([weights, classifier(weighted_loss, weights="weights")], graph)
    equal = mlotool.Program([classifier(plain_loss)], mlotool.Graph())
    print(f"test accuracy with equal weights {test_accuracy(equal, 'equal_weights'):.2f}, "
          f"with learned weights {test_accuracy(reweighted, 'reweighting'):.2f}")  # fmt: skip
