"""Learned domain weights for fine-tuning with LoRA: which texts should a frozen language model be fine-tuned on?

What it shows: a lower problem whose module is mostly frozen, an upper problem that learns one weight per domain, and
               a data set whose samples have a domain. The adapter is written by hand; PEFT's are used in the same way.
Command:       python examples/lora_mixture.py [TICKS]
It prints:     the learned weight of each domain; the validation texts are from the domain "letters"
"""

import sys

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import parametrize

import mlotool

TICKS = int(sys.argv[1]) if len(sys.argv) > 1 else 300
DOMAINS, VOCABULARY = ("digits", "letters", "noise"), 24


class LowRank(torch.nn.Module):
    """W + B A: the weight of a layer plus a product of two thin matrices; B is zero at the start."""

    def __init__(self, rows: int, columns: int, rank: int = 4) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.randn(rank, columns) / columns**0.5)
        self.b = torch.nn.Parameter(torch.zeros(rows, rank))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.b @ self.a


class Mixture(torch.nn.Module):
    """One weight per domain; the weights add up to 1."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(torch.zeros(len(DOMAINS)))

    def forward(self, domain: torch.Tensor) -> torch.Tensor:
        return self.logits.softmax(0)[domain]


def texts(domain: int, count: int, seed: int) -> list[dict[str, torch.Tensor | int]]:
    """Draw sequences of one domain: digits count up, letters go back by three, noise has no order."""
    start = torch.randint(12, (count, 1), generator=torch.Generator().manual_seed(seed))
    steps, noise = torch.arange(12), torch.randint(24, (count, 12))
    tokens = [(start + steps) % 12, 12 + (start - 3 * steps) % 12, noise][domain]
    return [{"tokens": row, "domain": domain} for row in tokens]


def next_token_loss(model, tokens):
    return cross_entropy(model(tokens[:, :-1]).movedim(-1, 1), tokens[:, 1:], reduction="none").mean(1)


def train_loss(batch, *, model, mixture):
    return (len(DOMAINS) * mixture(batch["domain"]) * next_token_loss(model, batch["tokens"])).mean()


def val_loss(batch, *, model):
    return next_token_loss(model, batch["tokens"]).mean()


if __name__ == "__main__":
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, 32), torch.nn.Linear(32, VOCABULARY))
    parametrize.register_parametrization(model.requires_grad_(False)[1], "weight", LowRank(VOCABULARY, 32))
    train = texts(0, 100, seed=0) + texts(1, 100, seed=1) + texts(2, 100, seed=2)
    adapter = mlotool.Problem("adapter", model, train_loss, roles={"model": "adapter", "mixture": "mixture"},
                              stream=mlotool.Stream(train, batch_size=60), optimizer="adam", lr=0.02,
                              hypergradient="finite_difference")  # fmt: skip
    mixture = mlotool.Problem("mixture", Mixture(), val_loss, roles={"model": "adapter"}, optimizer="adam", lr=0.02,
                              stream=mlotool.Stream(texts(1, 60, seed=9), batch_size=60))  # fmt: skip
    program = mlotool.Program([mixture, adapter], mlotool.Graph({"mixture": ["adapter"]}, {"adapter": ["mixture"]}))
    schedule = mlotool.Schedule(program)
    for _ in range(TICKS):
        schedule.tick()
    weights = mixture.module.logits.softmax(0).tolist()
    print(", ".join(f"{name} {weight:.2f}" for name, weight in zip(DOMAINS, weights, strict=True)))
