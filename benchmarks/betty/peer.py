"""Meta-Weight-Net in Betty, written as its own example does; Betty is imported from a clone on sys.path."""

import importlib
import logging
from typing import Any

import torch
from torch.utils.data import DataLoader

from benchmarks.betty.rival import Rival
from benchmarks.betty.task import (
    BATCH_SIZE_LOWER,
    BATCH_SIZE_UPPER,
    LEARNING_RATE_LOWER,
    LEARNING_RATE_UPPER,
    MOMENTUM,
    NUM_PRODUCTS,
    RADIUS,
    Task,
    mean_loss,
    sample_losses,
)


def build(task: Task, *, own_data: bool = False) -> Rival:
    """Return Betty's engine on the task.

    Args:
        task: the comparison.
        own_data: draw batches by torch's DataLoader, as Betty's examples do; else take those made beforehand.
    """
    problems = importlib.import_module("betty.problems")
    configs = importlib.import_module("betty.configs")
    engines = importlib.import_module("betty.engine")
    logging.getLogger("betty").disabled = True

    class Classifier(problems.ImplicitProblem):
        """The lower problem."""

        def training_step(self, batch: Any) -> torch.Tensor:
            batch = _as_dict(batch)
            losses = sample_losses(self(batch["input"]), batch)
            loss = (self.reweight(losses.detach()) * losses).mean()
            return task.regularize(loss, self.module.parameters())

    class Reweight(problems.ImplicitProblem):
        """The upper problem."""

        def training_step(self, batch: Any) -> torch.Tensor:
            batch = _as_dict(batch)
            return mean_loss(self.classifier(batch["input"]), batch)

    classifier, weight_net = task.make_classifier(), task.make_weight_net()
    train, meta = _loaders(task, own_data)
    lower = Classifier(
        name="classifier",
        config=configs.Config(unroll_steps=1, precision=task.precision, **_algorithm(task)),
        module=classifier,
        optimizer=torch.optim.SGD(classifier.parameters(), lr=LEARNING_RATE_LOWER, momentum=MOMENTUM),
        train_data_loader=train,
    )
    upper = Reweight(
        name="reweight",
        config=configs.Config(precision=task.precision),
        module=weight_net,
        optimizer=torch.optim.Adam(weight_net.parameters(), lr=LEARNING_RATE_UPPER),
        train_data_loader=meta,
    )
    engine = engines.Engine(
        problems=[upper, lower],
        config=configs.EngineConfig(strategy="cpu" if task.device == "cpu" else "gpu"),
        dependencies={"u2l": {upper: [lower]}, "l2u": {lower: [upper]}},
    )
    engine.train()

    def cycle() -> None:
        # What `Engine.run` does in an iteration without a validation.
        engine.global_step += 1
        engine.train_step()

    return Rival(cycle, classifier, weight_net)


def _algorithm(task: Task) -> dict[str, Any]:
    return {
        "fd": {"type": "darts", "darts_alpha": RADIUS},
        "neumann": {"type": "neumann", "neumann_iterations": NUM_PRODUCTS, "neumann_alpha": LEARNING_RATE_LOWER},
        "cg": {"type": "cg", "cg_iterations": NUM_PRODUCTS, "cg_alpha": 1.0},
    }[task.algorithm]


def _loaders(task: Task, own_data: bool) -> tuple[Any, Any]:
    if not own_data:
        return task.batches()
    train, meta = task.datasets()
    return (
        DataLoader(train, BATCH_SIZE_LOWER, shuffle=True, drop_last=True),
        DataLoader(meta, BATCH_SIZE_UPPER, shuffle=True, drop_last=True),
    )


def _as_dict(batch: Any) -> dict[str, torch.Tensor]:
    return batch if isinstance(batch, dict) else {"input": batch[0], "target": batch[1]}
