"""Meta-learning (MAML): an initialization from which five gradient steps learn a new sine wave.

What it shows: `tasks` gives a problem one copy of its parameters for each task; `reset_to` starts these copies from
               another problem's parameters; `SameBatch` gives both problems the same tasks.
Command:       python examples/maml.py [TICKS]
It prints:     the squared error on new waves after five steps, from the learned and from a random initialization
Source:        Finn et al. 2017, Model-Agnostic Meta-Learning (arXiv 1703.03400), section 5.1
"""

import math
import sys
from copy import deepcopy

import torch
from torch.nn.functional import mse_loss

import mlotool

TICKS, NUM_TASKS, NUM_STEPS, RATE = int(sys.argv[1]) if len(sys.argv) > 1 else 1500, 16, 5, 0.01


def wave(seed: int) -> dict[str, dict[str, torch.Tensor]]:
    """Draw a task: 10 points of a wave to train on (support), and 10 to measure the error on (query)."""
    generator = torch.Generator().manual_seed(seed)
    amplitude, phase = 0.1 + 4.9 * torch.rand(1, generator=generator), math.pi * torch.rand(1, generator=generator)
    x = 10 * torch.rand(20, 1, generator=generator) - 5
    y = amplitude * (x - phase).sin()
    return {"support": {"input": x[:10], "target": y[:10]}, "query": {"input": x[10:], "target": y[10:]}}


def on(part: str):
    def loss(batch, *, model):
        return mse_loss(model(batch[part]["input"]), batch[part]["target"])

    return loss


def net() -> torch.nn.Module:
    layers = torch.nn
    return layers.Sequential(
        layers.Linear(1, 40), layers.ReLU(), layers.Linear(40, 40), layers.ReLU(), layers.Linear(40, 1)
    )


def error_after_steps(start: torch.nn.Module, num_waves: int = 100) -> float:
    """Return the mean query error on new waves, after training on the support points of each wave in plain torch."""
    total = 0.0
    for seed in range(100_000, 100_000 + num_waves):
        task, model = wave(seed), deepcopy(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        for _ in range(NUM_STEPS):
            optimizer.zero_grad()
            on("support")(task, model=model).backward()
            optimizer.step()
        total += on("query")(task, model=model).item()
    return total / num_waves


if __name__ == "__main__":
    torch.manual_seed(0)
    tasks = mlotool.Stream([wave(seed) for seed in range(4000)], batch_size=NUM_TASKS, repeat=NUM_STEPS)
    learner = mlotool.Problem("learner", net(), on("support"), roles={"model": "learner"}, stream=tasks,
                              optimizer=torch.optim.SGD, lr=RATE, tasks=NUM_TASKS, reset_to="meta",
                              unroll_steps=NUM_STEPS, hypergradient="unrolled")  # fmt: skip
    meta = mlotool.Problem("meta", net(), on("query"), roles={"model": "learner"}, stream=mlotool.SameBatch(tasks),
                           optimizer="adam", lr=1e-3)  # fmt: skip
    program = mlotool.Program([meta, learner], mlotool.Graph({"meta": ["learner"]}, {"learner": ["meta"]}))
    at_random = error_after_steps(meta.module)
    schedule = mlotool.Schedule(program)
    for _ in range(TICKS):
        schedule.tick()
    print(f"squared error after {NUM_STEPS} steps: learned initialization {error_after_steps(meta.module):.2f}, "
          f"random initialization {at_random:.2f}")  # fmt: skip
