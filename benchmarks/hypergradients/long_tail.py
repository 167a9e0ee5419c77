"""Table 1 of Betty's paper at a REDUCED size: long-tailed digits and an MLP in place of CIFAR-10 and a ResNet-32.

At most 114 training images a class, falling geometrically by the imbalance factor; 10 a class for the weight net; 50 a
class to test on. Seeds draw the split and the weights.
"""

import itertools
import statistics
import time
import warnings
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from benchmarks.betty import task as digits
from benchmarks.hypergradients import ours, tasks
from mlotool.program import Schedule

FACTORS = (200, 100, 50)
NUM_LARGEST, NUM_META, NUM_TEST = 114, 10, 50
"""Images of the largest class, and of every class in the meta and the test split."""
LOWER_RATE, MOMENTUM = 0.05, 0.9
SERIES_STEP = 0.02
"""Step size of series and fixed points: below 2 / (largest eigenvalue) without a proximal term."""
METHODS = {
    "no reweighting": (None, 1),
    "MWN, AID-FD": ("finite_difference_stop", 1),
    "MWN, AID-FD, 5 steps": ("finite_difference_stop", 5),
    "MWN, SAMA": ("sama", 1),
    "MWN, Neumann": ("neumann", 1),
    "MWN, CG": ("cg", 1),
    "MWN, SOBA": ("soba", 1),
    "MWN, unrolled 5": ("unrolled", 5),
}


@lru_cache
def splits(factor: float, seed: int) -> tuple[tasks.Batch, tasks.Batch, tasks.Batch]:
    """Return the train, meta and test images."""
    images, target = load_digits(return_X_y=True)
    inputs = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    labels = torch.tensor(target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    parts: tuple[list[Tensor], ...] = ([], [], [])
    for label in range(10):
        rows = order[labels[order] == label]
        count = max(1, round(NUM_LARGEST * factor ** (-label / 9)))
        bounds = (NUM_TEST, NUM_TEST + NUM_META, NUM_TEST + NUM_META + count)
        for part, chosen in zip(
            parts, (rows[bounds[1] : bounds[2]], rows[bounds[0] : bounds[1]], rows[: bounds[0]]), strict=True
        ):
            part.append(chosen)
    train, meta, test = ({"input": inputs[torch.cat(part)], "target": labels[torch.cat(part)]} for part in parts)
    return train, meta, test


def task(factor: float, seed: int) -> tasks.Bilevel:
    """Return Meta-Weight-Net on a split, from the start; no proximal term."""
    train, meta, _ = splits(factor, seed)

    def seeded(make: Any) -> nn.Module:
        module = make()
        torch.manual_seed(1000 + seed)
        for layer in module.modules():
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()
        return module

    settings = digits.Task("mlp", "fd")

    def lower_loss(lower: Any, _: Any, upper: Any, batch: tasks.Batch, detach: Any) -> Tensor:
        losses = digits.sample_losses(lower(batch["input"]), batch)
        return (upper(detach(losses)) * losses).mean()

    return replace(
        tasks.reweighting("mlp"),
        make_lower=lambda: seeded(settings.make_classifier),
        make_upper=lambda: seeded(settings.make_weight_net),
        view=lower_loss,
        lower_batches=_numbered(train, digits.BATCH_SIZE_LOWER, seed),
        upper_batches=_numbered(meta, digits.BATCH_SIZE_UPPER, seed),
        learning_rate=SERIES_STEP,
        num_products=3,
        proximal_weight=0.0,
    )


def schedule_of(problem: tasks.Bilevel, kind: str, num_steps: int) -> Schedule:
    """Return a schedule that trains the classifier by momentum, and the weight net by Adam."""
    optimizer = partial(torch.optim.SGD, lr=LOWER_RATE, momentum=MOMENTUM)
    problem = replace(problem, num_steps=num_steps)
    return Schedule(ours.make_program(problem, ours.algorithm_of(kind, problem), kind, num_steps, optimizer=optimizer))


def accuracy(model: nn.Module, batch: tasks.Batch) -> float:
    """Return the share of right answers."""
    with torch.no_grad():
        return float((model(batch["input"]).argmax(1) == batch["target"]).double().mean())


def measure(num_ticks: int, num_seeds: int) -> dict[str, Any]:
    """Return test accuracies, and print the table.

    Args:
        num_ticks: training steps of the classifier.
        num_seeds: splits and starts.
    """
    rows = []
    for (name, (kind, num_steps)), factor in itertools.product(METHODS.items(), FACTORS):
        start = time.process_time()
        found = [100 * _trained(kind, num_steps, factor, seed, num_ticks) for seed in range(num_seeds)]
        rows.append(
            {
                "name": name,
                "imbalance_factor": factor,
                "accuracy": found,
                "mean": statistics.mean(found),
                "deviation": statistics.stdev(found),
                "cpu_seconds": (time.process_time() - start) / num_seeds,
            }
        )
        last = rows[-1]
        print(
            f"{name}, {factor}: {last['mean']:.1f} +- {last['deviation']:.1f} %, {last['cpu_seconds']:.1f} s",
            flush=True,
        )
    return {"num_ticks": num_ticks, "num_seeds": num_seeds, "note": "reduced size: digits, MLP", "rows": rows}


def _trained(kind: str | None, num_steps: int, factor: float, seed: int, num_ticks: int) -> float:
    problem, test = task(factor, seed), splits(factor, seed)[2]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kind is None:
            return accuracy(_plainly_trained(problem, num_ticks), test)
        schedule = schedule_of(problem, kind, num_steps)
        for _ in range(num_ticks):
            schedule.tick()
    return accuracy(schedule.program.problems["lower"].module, test)


def _plainly_trained(problem: tasks.Bilevel, num_ticks: int) -> nn.Module:
    module = problem.make_lower()
    optimizer = torch.optim.SGD(module.parameters(), lr=LOWER_RATE, momentum=MOMENTUM)
    batches = digits.CyclingBatches(problem.lower_batches)
    for _ in range(num_ticks):
        optimizer.zero_grad()
        problem.upper_loss(module, batches.next()).backward()
        optimizer.step()
    return module


def _numbered(data: tasks.Batch, size: int, seed: int) -> list[tasks.Batch]:
    """Return one epoch of batches: a fixed partition."""
    order = torch.randperm(len(data["target"]), generator=torch.Generator().manual_seed(seed))
    parts = [part for part in order.split(size) if len(part) == size]
    return [
        {"input": data["input"][part], "target": data["target"][part], "number": number}
        for number, part in enumerate(parts)
    ]
