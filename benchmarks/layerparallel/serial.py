"""The rival to beat: backpropagation through the whole model in one process."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.layerparallel.model import Workload


def build(workload: Workload, num_threads: int) -> Callable[[], list[Tensor]]:
    """Return a cycle: one batch and one step of SGD. It returns the gradients."""
    torch.set_num_threads(num_threads)
    model = workload.make_model()
    optimizer = torch.optim.SGD(model.parameters(), workload.learning_rate)
    batches = workload.batches()

    def cycle() -> list[Tensor]:
        images, targets = next(batches)
        optimizer.zero_grad()
        F.cross_entropy(model(images), targets).backward()
        optimizer.step()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    return cycle
