"""The peer: torch.distributed.pipelining on the same model, which computes the serial gradient."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from benchmarks.layerparallel.model import Workload
from mlotool.distributed.collectives import Ranks

SCHEDULES: dict[str, Any] = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}


def build(ranks: Ranks, workload: Workload, schedule: str, num_micro_batches: int) -> Callable[[], list[Tensor]]:
    """Return a rank's cycle: one batch and one step of SGD. It returns the gradients of the rank's stage.

    Args:
        ranks: one a stage.
        workload: what is trained.
        schedule: one of SCHEDULES.
        num_micro_batches: into which each batch is cut.
    """
    module = workload.make_stages(ranks.size)[ranks.rank]
    optimizer = torch.optim.SGD(module.parameters(), workload.learning_rate)
    stage = PipelineStage(module, ranks.rank, ranks.size, torch.device("cpu"))
    pipeline = SCHEDULES[schedule](stage, num_micro_batches, loss_fn=F.cross_entropy)
    batches = workload.batches()

    def cycle() -> list[Tensor]:
        images, targets = next(batches)
        optimizer.zero_grad()
        if stage.is_first:
            pipeline.step(images)
        else:
            # Without the outputs: to put them together is no part of training.
            pipeline.step(target=targets, return_outputs=False)
        optimizer.step()
        return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]

    return cycle
