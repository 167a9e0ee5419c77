"""Meta-Weight-Net on digits whose result does not depend on the number of ranks: no BatchNorm, plain means."""

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.betty.task import (
    BATCH_SIZE_LOWER,
    BATCH_SIZE_UPPER,
    CG_PROXIMAL_WEIGHT,
    LEARNING_RATE_LOWER,
    LEARNING_RATE_UPPER,
    MOMENTUM,
    NUM_PRODUCTS,
    RADIUS,
    Batch,
    Task,
    mean_loss,
    sample_losses,
)
from mlotool.core import stop_gradient
from mlotool.data import InMemoryDataset, Normalization
from mlotool.distributed.collectives import Ranks
from mlotool.hypergradient import ConjugateGradient, Identity, Implicit, Neumann
from mlotool.models import ResNet
from mlotool.problem.rank_mean import Reduce
from mlotool.program import Graph, Problem, Program, Schedule, Stream
from mlotool.runner.distributed import distribute

LOWER, UPPER = "classifier", "reweight"
MODELS = ("mlp", "resnet")
ALGORITHMS = ("finite_difference", "neumann", "cg")
RESNET_DEPTH, NORM_GROUPS = 8, 4


@dataclass(frozen=True)
class Workload:
    """What is computed, whoever computes it.

    Args:
        model: one of MODELS.
        algorithm: one of ALGORITHMS.
        dtype: of parameters and inputs.
    """

    model: str
    algorithm: str
    dtype: torch.dtype = torch.float32

    def make_classifier(self) -> nn.Module:
        """Return the lower problem's model, the same at every call."""
        if self.model == "mlp":
            return Task("mlp", "fd", dtype=self.dtype).make_classifier()
        torch.manual_seed(0)
        return _without_batch_norm(ResNet(RESNET_DEPTH, 10, [1, 8, 8])).to(dtype=self.dtype)


def program(workload: Workload, reduce: Reduce | None = None) -> Program:
    """Return the program as one process has it; batches are global ones."""
    start = _start(workload) if workload.algorithm == "cg" else []

    def weighted_loss(batch: Batch, *, classifier: Any, reweight: Any) -> Tensor:
        losses = sample_losses(classifier(batch["input"]), batch)
        loss = (reweight(stop_gradient(losses)) * losses).mean()
        if not start:
            return loss
        pairs = zip(classifier.parameters(), start, strict=True)
        return (
            loss + 0.5 * CG_PROXIMAL_WEIGHT * torch.stack([(a - b.to(a.device)).square().sum() for a, b in pairs]).sum()
        )

    def meta_loss(batch: Batch, *, classifier: Any) -> Tensor:
        return mean_loss(classifier(batch["input"]), batch)

    task = Task("mlp", "fd", dtype=workload.dtype)
    splits = [InMemoryDataset(*each.tensors, Normalization([0.0], [1.0], 1.0)) for each in task.datasets()]
    train, meta = Stream(splits[0], BATCH_SIZE_LOWER), Stream(splits[1], BATCH_SIZE_UPPER)
    problems = [
        Problem(
            UPPER,
            task.make_weight_net(),
            meta_loss,
            roles={LOWER: LOWER},
            stream=meta.to(dtype=workload.dtype),
            optimizer=partial(torch.optim.Adam, lr=LEARNING_RATE_UPPER),
        ),
        Problem(
            LOWER,
            workload.make_classifier(),
            weighted_loss,
            roles={LOWER: LOWER, UPPER: UPPER},
            stream=train.to(dtype=workload.dtype),
            optimizer=partial(torch.optim.SGD, lr=LEARNING_RATE_LOWER, momentum=MOMENTUM),
            hypergradient=algorithm(workload.algorithm),
        ),
    ]
    return Program(problems, Graph(upper_to_lower={UPPER: [LOWER]}, lower_to_upper={LOWER: [UPPER]}), reduce)


def schedule(workload: Workload, ranks: Ranks) -> Schedule:
    """Return the schedule of one of the ranks."""
    made = program(workload, ranks.reduce)
    distribute(made, ranks, seed=0)
    return Schedule(made)


def algorithm(name: str) -> Implicit:
    """Return the hypergradient of that name."""
    if name == "finite_difference":
        return Implicit(Identity(), "finite_difference", radius=RADIUS)
    if name == "neumann":
        # The identity is a term, and takes no product.
        return Implicit(Neumann(num_terms=NUM_PRODUCTS + 1, step_size=LEARNING_RATE_LOWER))
    return Implicit(ConjugateGradient(max_iterations=NUM_PRODUCTS, tolerance=0.0))


def num_parameters(made: Program) -> dict[str, int]:
    """Return how many numbers each problem's theta has."""
    return {name: sum(each.numel() for each in problem.theta.values()) for name, problem in made.problems.items()}


@lru_cache
def _start(workload: Workload) -> list[Tensor]:
    return [parameter.detach() for parameter in workload.make_classifier().parameters()]


def _without_batch_norm(model: nn.Module) -> nn.Module:
    """Put GroupNorm where BatchNorm was, which would normalise each rank's share by itself."""
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, nn.BatchNorm2d):
                setattr(parent, name, nn.GroupNorm(NORM_GROUPS, layer.num_features))
    return model
