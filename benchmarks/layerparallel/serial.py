"""The rival to beat: backpropagation through the whole model in one process."""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.layerparallel.workload import AbstractWorkload


def build(workload: AbstractWorkload, num_threads: int) -> Callable[[], list[Tensor]]:
    """Return a cycle: one batch and one step of SGD. It returns the gradients."""
    torch.set_num_threads(num_threads)
    model = workload.make_model()
    optimizer = workload.make_optimizer(model.parameters())
    batches = workload.batches()

    def cycle() -> list[Tensor]:
        inputs, targets = next(batches)
        optimizer.zero_grad()
        workload.loss(model(inputs), targets).backward()
        optimizer.step()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    return cycle
