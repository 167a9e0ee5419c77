"""A custom training loop: mlotool computes only the hypergradient, and plain torch does all the rest.

What it shows: problems without optimizer and without stream, and `program.gradient(name, batches)`.
Command:       python examples/own_loop.py [STEPS]
It prints:     the learned weight decay, and the validation error with and without it
"""

import sys

import torch
from torch.nn.functional import mse_loss

import mlotool

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 100
torch.manual_seed(0)
inputs = torch.randn(200, 20)
targets = inputs[:, :1] + 0.5 * torch.randn(200, 1)  # 19 of the 20 inputs are noise
train, val = (inputs[:40], targets[:40]), (inputs[40:], targets[40:])


class Decay(torch.nn.Module):
    """The weight decay, a positive number: its logarithm is the parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.log = torch.nn.Parameter(torch.tensor(-7.0))

    def forward(self) -> torch.Tensor:
        return self.log.exp()


def train_loss(batch, *, model, hyper):
    x, y = batch
    return mse_loss(model(x), y) + hyper() * sum(p.square().sum() for p in model.parameters())


def val_loss(batch, *, model):
    x, y = batch
    return mse_loss(model(x), y)


model, hyper = torch.nn.Linear(20, 1), Decay()
model_optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
hyper_optimizer = torch.optim.Adam(hyper.parameters(), lr=0.1)


def train_model(num_steps: int) -> float:
    """Train the model in the ordinary way with the current weight decay; return its validation error."""
    for _ in range(num_steps):
        model_optimizer.zero_grad()
        train_loss(train, model=model, hyper=hyper).backward()
        model_optimizer.step()
    with torch.no_grad():
        return val_loss(val, model=model).item()


if __name__ == "__main__":
    lower = mlotool.Problem("model", model, train_loss, roles={"model": "model", "hyper": "hyper"},
                            hypergradient="cg_convex")  # fmt: skip
    upper = mlotool.Problem("hyper", hyper, val_loss, roles={"model": "model"})
    program = mlotool.Program([upper, lower], mlotool.Graph({"hyper": ["model"]}, {"model": ["hyper"]}))
    without = train_model(500)
    for _ in range(STEPS):
        train_model(10)
        # The hypergradient d val_loss(model*(hyper)) / d hyper, through the solution model* of the lower problem.
        gradient = program.gradient("hyper", {"model": train, "hyper": val})
        for name, parameter in hyper.named_parameters():
            parameter.grad = gradient[name]
        hyper_optimizer.step()
    print(f"weight decay {hyper().item():.2f}: validation error {train_model(500):.3f}, without it {without:.3f}")
