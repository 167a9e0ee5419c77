"""Meta-Weight-Net in mlotool's plain torch engine."""

from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.betty.rival import Rival
from benchmarks.betty.task import (
    BATCH_SIZE_LOWER,
    BATCH_SIZE_UPPER,
    LEARNING_RATE_LOWER,
    LEARNING_RATE_UPPER,
    MOMENTUM,
    NUM_PRODUCTS,
    RADIUS,
    Batch,
    CyclingBatches,
    Task,
    mean_loss,
    sample_losses,
)
from mlotool.core import stop_gradient
from mlotool.data import InMemoryDataset, Normalization
from mlotool.hypergradient import ConjugateGradient, Identity, Implicit, Neumann
from mlotool.program import Graph, Problem, Program, Schedule, Stream


def build(
    task: Task,
    *,
    with_stop_gradient: bool = False,
    own_data: bool = False,
    is_compiled: bool = False,
    trace: str | None = None,
) -> Rival:
    """Return mlotool's schedule on the task.

    Args:
        task: the comparison.
        with_stop_gradient: the lower loss detaches by `stop_gradient`, as mlotool's own losses do; else by `detach`.
        own_data: draw batches by `Stream`; else take those made beforehand.
        is_compiled: the classifier runs through `torch.compile`.
        trace: as for `Program`; such a rival can be restarted, since a compiler takes long.
    """
    schedule = _schedule(task, stop_gradient if with_stop_gradient else Tensor.detach, own_data, is_compiled, trace)
    problems = schedule.program.problems
    restart = None if trace is None else _restart_of(schedule)

    def cycle() -> None:
        schedule.tick()

    return Rival(cycle, problems["classifier"].module, problems["reweight"].module, restart)


def solves(task: Task, num_cycles: int) -> Counter[str]:
    """Return how often the solves of so many cycles ended in what way: at negative curvature CG does less."""
    schedule = _schedule(task, Tensor.detach, own_data=False)
    found: Counter[str] = Counter()
    for _ in range(num_cycles):
        schedule.tick()
        last = schedule.program.internals.algorithm_state("classifier").last
        found[f"{last.status.value}, {last.num_products} products"] += 1
    return found


def _restart_of(schedule: Schedule) -> Callable[[], None]:
    """Return what brings a schedule back to where it is now."""
    start = deepcopy((schedule.program.state_dict(), schedule.state_dict()))

    def restart() -> None:
        schedule.program.load_state_dict(start[0])
        schedule.load_state_dict(start[1])

    return restart


def _schedule(
    task: Task,
    detach: Callable[[Tensor], Tensor],
    own_data: bool,
    is_compiled: bool = False,
    trace: str | None = None,
) -> Schedule:
    def weighted_loss(batch: Batch, *, classifier: Any, reweight: Any) -> Tensor:
        losses = sample_losses(classifier(batch["input"]), batch)
        loss = (reweight(detach(losses)) * losses).mean()
        return task.regularize(loss, classifier.parameters())

    def meta_loss(batch: Batch, *, classifier: Any) -> Tensor:
        return mean_loss(classifier(batch["input"]), batch)

    train, meta = _streams(task, own_data)
    problems = [
        Problem(
            "reweight",
            task.make_weight_net(),
            meta_loss,
            roles={"classifier": "classifier"},
            stream=meta,
            optimizer=partial(torch.optim.Adam, lr=LEARNING_RATE_UPPER),
            precision=task.precision,
        ),
        Problem(
            "classifier",
            task.make_classifier(),
            weighted_loss,
            roles={"classifier": "classifier", "reweight": "reweight"},
            stream=train,
            optimizer=partial(torch.optim.SGD, lr=LEARNING_RATE_LOWER, momentum=MOMENTUM),
            hypergradient=_algorithm(task),
            precision=task.precision,
            compile=is_compiled,
        ),
    ]
    graph = Graph(upper_to_lower={"reweight": ["classifier"]}, lower_to_upper={"classifier": ["reweight"]})
    return Schedule(Program(problems, graph, trace=trace))


def _algorithm(task: Task) -> Implicit:
    if task.algorithm == "fd":
        return Implicit(Identity(), "finite_difference", radius=RADIUS)
    if task.algorithm == "neumann":
        # The identity is a term, and takes no product.
        return Implicit(Neumann(num_terms=NUM_PRODUCTS + 1, step_size=LEARNING_RATE_LOWER))
    return Implicit(ConjugateGradient(max_iterations=NUM_PRODUCTS, tolerance=0.0))


def _streams(task: Task, own_data: bool) -> tuple[Any, Any]:
    if not own_data:
        train, meta = task.batches()
        return CyclingBatches(train), CyclingBatches(meta)
    splits = [InMemoryDataset(*each.tensors, Normalization([0.0], [1.0], 1.0)) for each in task.datasets()]
    return Stream(splits[0], BATCH_SIZE_LOWER), Stream(splits[1], BATCH_SIZE_UPPER)
