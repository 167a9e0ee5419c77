"""Data-parallel training: two processes compute half of every batch each, with the same result as one process.

What it shows: `mlotool.fit` under torchrun; only the last lines, which print the result, depend on the process.
Command:       python -m torch.distributed.run --nproc-per-node 2 examples/distributed.py [TICKS]
               With GPUs, each process uses one of them. Without GPUs, the processes run on the CPU (gloo).
It prints:     processes 2, validation error 0.5458
"""

import os
import sys

import torch
from torch.nn.functional import mse_loss

import mlotool

TICKS = int(sys.argv[1]) if len(sys.argv) > 1 else 300
torch.manual_seed(0)  # all processes have to create the same data and parameters
inputs = torch.randn(200, 20, dtype=torch.float64)
targets = inputs[:, :1] + 0.5 * torch.randn(200, 1, dtype=torch.float64)
samples = [{"input": x, "target": y} for x, y in zip(inputs, targets, strict=True)]


class Decay(torch.nn.Module):
    """The weight decay, a positive number: its logarithm is the parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.log = torch.nn.Parameter(torch.tensor(-5.0, dtype=torch.float64))

    def forward(self) -> torch.Tensor:
        return self.log.exp()


def train_loss(batch, *, model, decay):
    squares = sum(parameter.square().sum() for parameter in model.parameters())
    return mse_loss(model(batch["input"]), batch["target"]) + decay() * squares


def val_loss(batch, *, model):
    return mse_loss(model(batch["input"]), batch["target"])


if __name__ == "__main__":
    model = mlotool.Problem("model", torch.nn.Linear(20, 1, dtype=torch.float64), train_loss,
                            roles={"model": "model", "decay": "decay"}, optimizer=torch.optim.SGD, lr=0.1,
                            stream=mlotool.Stream(samples[:40], batch_size=20), hypergradient="cg_convex",
                            unroll_steps=5)  # fmt: skip
    decay = mlotool.Problem("decay", Decay(), val_loss, roles={"model": "model"}, optimizer="adam", lr=0.1,
                            stream=mlotool.Stream(samples[40:], batch_size=80))  # fmt: skip
    program = mlotool.Program([decay, model], mlotool.Graph({"decay": ["model"]}, {"model": ["decay"]}))
    evaluate = {"problem": "model", "metrics": ["mean_squared_error"], "splits": {"val": "end"}}
    result = mlotool.fit(program, TICKS, data={"val": samples[40:]}, evaluate=evaluate, report=False)
    if os.environ.get("RANK", "0") == "0":
        size = os.environ.get("WORLD_SIZE", "1")
        print(f"processes {size}, validation error {result.metrics['val/mean_squared_error']:.4f}")
