"""The peer: torch.distributed.pipelining on the same model, which computes the serial gradient."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from benchmarks.layerparallel.workload import AbstractWorkload
from mlotool.distributed.collectives import Ranks


@dataclass(frozen=True)
class Kind:
    """A kind of schedule.

    Args:
        make: of torch's.
        stages: of the model, by rank and number of ranks.
    """

    make: Any
    stages: Callable[[int, int], list[int]]


def _one(rank: int, num_ranks: int) -> list[int]:
    return [rank]


def _loop(rank: int, num_ranks: int) -> list[int]:
    return [rank, num_ranks + rank]


def _v(rank: int, num_ranks: int) -> list[int]:
    return [rank, 2 * num_ranks - 1 - rank]


KINDS = {
    "GPipe": Kind(pipelining.ScheduleGPipe, _one),
    "1F1B": Kind(pipelining.Schedule1F1B, _one),
    "interleaved 1F1B": Kind(pipelining.ScheduleInterleaved1F1B, _loop),
    "zero bubble, V": Kind(pipelining.ScheduleZBVZeroBubble, _v),
}


def check(num_ranks: int, workload: AbstractWorkload, kind: str, num_micro_batches: int) -> None:
    """Refuse what cannot be cut.

    Raises:
        ValueError: the batch has no equal parts, or the model too few layers.
    """
    if workload.batch_size % num_micro_batches:
        raise ValueError(f"a batch of {workload.batch_size} has no {num_micro_batches} equal parts")
    workload.make_stages(len(KINDS[kind].stages(0, num_ranks)) * num_ranks)


def build(
    ranks: Ranks, workload: AbstractWorkload, kind: str, num_micro_batches: int
) -> Callable[[], dict[int, list[Tensor]]]:
    """Return a rank's cycle: one batch and one step of SGD. It returns the gradients of the rank's stages.

    Args:
        ranks: each has one stage, or two.
        workload: what is trained.
        kind: one of KINDS.
        num_micro_batches: into which each batch is cut.

    Raises:
        ValueError: as of `check`.
    """
    check(ranks.size, workload, kind, num_micro_batches)
    own = KINDS[kind].stages(ranks.rank, ranks.size)
    num_stages = len(own) * ranks.size
    made = workload.make_stages(num_stages)
    modules = {number: made[number] for number in own}
    stages = [PipelineStage(each, number, num_stages, torch.device("cpu")) for number, each in modules.items()]
    given = stages[0] if len(stages) == 1 else stages
    pipeline = KINDS[kind].make(given, num_micro_batches, loss_fn=workload.loss)
    optimizer = workload.make_optimizer([each for module in modules.values() for each in module.parameters()])
    has_first, has_last = 0 in own, num_stages - 1 in own
    batches = workload.batches()

    def cycle() -> dict[int, list[Tensor]]:
        inputs, targets = next(batches)
        optimizer.zero_grad()
        # Without the outputs: to put them together is no part of training.
        pipeline.step(*([inputs] if has_first else []), target=targets if has_last else None, return_outputs=False)
        optimizer.step()
        return {
            number: [each.grad for each in module.parameters() if each.grad is not None]
            for number, module in modules.items()
        }

    return cycle
