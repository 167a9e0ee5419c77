"""Hyperparameters by hypergradients: the weight decay of the optimizer, and the strength of the augmentation.

What it shows: two upper problems above one model; `optimizer_roles`, with which an upper problem sets the weight decay
               of the model's optimizer; hypergradients through the optimizer's steps (`hypergradient="unrolled"`).
Command:       python examples/weight_decay_and_augmentation.py [TICKS]
It prints:     the learned weight decay and noise, the validation error with them, and with their initial values
"""

import sys

import torch
from torch.nn.functional import mse_loss, softplus

import mlotool

TICKS = int(sys.argv[1]) if len(sys.argv) > 1 else 500
torch.manual_seed(0)
inputs = torch.randn(240, 30)
targets = inputs[:, :1] + 0.5 * torch.randn(240, 1)  # 29 of the 30 inputs are noise
samples = [{"input": x, "target": y} for x, y in zip(inputs, targets, strict=True)]
train, val = mlotool.Stream(samples[:40], batch_size=40), mlotool.Stream(samples[40:], batch_size=200)


class WeightDecay(torch.nn.Module):
    """A positive number; the module is called without arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.raw = torch.nn.Parameter(torch.tensor(-3.0))

    def forward(self) -> torch.Tensor:
        return softplus(self.raw)


class Noise(torch.nn.Module):
    """Adds noise to inputs; its standard deviation is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.raw = torch.nn.Parameter(torch.tensor(-3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + softplus(self.raw) * torch.randn_like(x)


def train_loss(batch, *, model, noise):
    return mse_loss(model(noise(batch["input"])), batch["target"])


def val_loss(batch, *, model):
    return mse_loss(model(batch["input"]), batch["target"])


def upper(name: str, module: torch.nn.Module) -> mlotool.Problem:
    return mlotool.Problem(name, module, val_loss, roles={"model": "model"}, stream=val, optimizer="adam", lr=0.1)


def trained_error(*, is_learned: bool) -> tuple[float, mlotool.Program]:
    torch.manual_seed(1)
    model = mlotool.Problem("model", torch.nn.Linear(30, 1), train_loss, roles={"model": "model", "noise": "noise"},
                            stream=train, optimizer=torch.optim.SGD, lr=0.05, unroll_steps=10,
                            optimizer_roles={"weight_decay": "decay"}, hypergradient="unrolled")  # fmt: skip
    uppers = [upper("decay", WeightDecay()), upper("noise", Noise())]
    if not is_learned:
        for problem in uppers:
            problem.optimizer.param_groups[0]["lr"] = 0.0
    names = [problem.name for problem in uppers]
    program = mlotool.Program([*uppers, model], mlotool.Graph({name: ["model"] for name in names}, {"model": names}))
    schedule = mlotool.Schedule(program)
    for _ in range(TICKS):
        schedule.tick()
    return program.loss("decay").loss.item(), program


if __name__ == "__main__":
    before, _ = trained_error(is_learned=False)
    after, program = trained_error(is_learned=True)
    sizes = [softplus(program.problems[name].module.raw).item() for name in ("decay", "noise")]
    print(f"weight decay {sizes[0]:.2f}, noise {sizes[1]:.2f}: validation error {after:.2f}, initially {before:.2f}")
