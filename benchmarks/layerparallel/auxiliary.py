"""mlotool's auxiliary variables: a stage a rank, whose forward and backward pass wait for no other stage's."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness.pair import NUM_RANKS
from benchmarks.layerparallel.model import NUM_BATCHES, Workload
from mlotool.data.in_memory_tensors import InMemoryTensors
from mlotool.distributed.collectives import Ranks
from mlotool.layerparallel import Auxiliary
from mlotool.layerparallel.speedup import BatchSeconds
from mlotool.program import Graph, Problem, Program, Schedule, Stream
from mlotool.report.parallel_records import Span, Timeline
from mlotool.runner.distributed import distribute

NAME = "classifier"
AUXNET_SHARE = 6
"""An AuxNet has a sixth of the blocks, as the paper's ResNet-20 has of the ResNet-110's."""
RECORDED = 6


def build(ranks: Ranks, workload: Workload, variables: str) -> Callable[[], object]:
    """Return a rank's cycle: one batch, with one step of SGD and of what the method keeps beside.

    Args:
        ranks: one a stage, or one for all stages.
        workload: what is trained.
        variables: "stored" (with multipliers: the augmented Lagrangian), "auxnet" or "recursive".
    """
    return _schedule(ranks, workload, variables).tick


def trained(ranks: Ranks, workload: Workload, variables: str) -> list[Tensor]:
    """Return the parameters after each of NUM_BATCHES steps, as vectors; the same on all ranks."""
    schedule, found = _schedule(ranks, workload, variables), []
    for _ in range(NUM_BATCHES):
        schedule.tick()
        state = schedule.program.state_dict()[NAME]["module"]
        found.append(torch.cat([each.reshape(-1).clone() for each in state.values()]))
    return found


def parts(workload: Workload, variables: str) -> BatchSeconds:
    """Return what a batch takes where no stage waits: all of them in this process, one after the other."""
    schedule = _schedule(Ranks(), workload, variables, record=RECORDED)
    for _ in range(RECORDED):
        schedule.tick()
    parallel = schedule.program.problems[NAME].parallel
    assert parallel is not None
    recorded: Any = parallel.timeline()
    return Timeline(NAME, NUM_RANKS, tuple(Span(**span) for span in recorded["spans"])).seconds


def _schedule(ranks: Ranks, workload: Workload, variables: str, record: int = 0) -> Schedule:
    auxnet = Workload(
        workload.num_blocks // AUXNET_SHARE, workload.num_channels, workload.image_size, workload.batch_size
    )
    parallel = Auxiliary(
        stages=NUM_RANKS,
        cut=["1"],
        method="lagrangian" if variables == "stored" else "penalty",
        variables=variables,
        auxnet=None if variables == "stored" else nn.Sequential(*auxnet.make_stages(NUM_RANKS)),
        beta=1.0,
        processes=ranks.size > 1,
        record=record,
    )
    problem = Problem(
        NAME,
        nn.Sequential(*workload.make_stages(NUM_RANKS)),
        _loss,
        roles={"model": NAME},
        stream=Stream(InMemoryTensors(workload.samples()), workload.batch_size, shuffle=False),
        optimizer=partial(torch.optim.SGD, lr=workload.learning_rate),
        parallel=parallel,
    )
    program = Program([problem], Graph(), ranks.reduce)
    distribute(program, ranks, seed=0)
    return Schedule(program)


def _loss(batch: dict[str, Tensor], *, model: Any) -> Tensor:
    return F.cross_entropy(model(batch["input"]), batch["target"])
