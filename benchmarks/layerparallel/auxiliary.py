"""mlotool's auxiliary variables: a stage a rank, whose forward and backward pass wait for no other stage's."""

import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from benchmarks.layerparallel.workload import AbstractWorkload
from mlotool.data.splits import InMemoryTensors
from mlotool.distributed.collectives import Ranks
from mlotool.layerparallel import Auxiliary
from mlotool.layerparallel.speedup import BatchSeconds
from mlotool.program import Graph, Problem, Program, Schedule, Stream
from mlotool.report.layer_parallel import Span, Timeline
from mlotool.runner.distributed import distribute

NAME = "classifier"
RECORDED, BETA = 6, 10.0
NETWORKS = {"auxnet_optimizer": "adam", "auxnet_lr": 1e-3}
METHODS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "stored, penalty": {"variables": "stored", "method": "penalty"},
        "stored, lagrangian": {"variables": "stored", "method": "lagrangian", "lambda_rate": 0.3},
        "AuxNet": {"variables": "auxnet", **NETWORKS},
        "ReAuxNet": {"variables": "recursive", **NETWORKS},
    }
)
"""As the table of accuracies has them."""


def build(ranks: Ranks, workload: AbstractWorkload, method: str, num_stages: int) -> Callable[[], object]:
    """Return a rank's cycle: one batch, with one step of SGD and of what the method keeps beside.

    Args:
        ranks: one a stage, or one for all stages.
        workload: what is trained.
        method: one of METHODS.
        num_stages: K.
    """
    return _schedule(ranks, workload, method, num_stages).tick


def trained(ranks: Ranks, workload: AbstractWorkload, method: str, num_stages: int) -> list[Tensor]:
    """Return parameters and buffers after each of `num_batches` steps, as vectors; the same on all ranks."""
    schedule, found = _schedule(ranks, workload, method, num_stages), []
    for _ in range(workload.num_batches):
        schedule.tick()
        state = schedule.program.state_dict()[NAME]["module"]
        found.append(torch.cat([each.reshape(-1).to(workload.dtype) for each in state.values()]))
    return found


def parts(workload: AbstractWorkload, method: str, num_stages: int) -> BatchSeconds:
    """Return what a batch takes where no stage waits: all of them in this process, one after the other."""
    schedule = _schedule(Ranks(), workload, method, num_stages, record=RECORDED)
    for _ in range(RECORDED):
        schedule.tick()
    parallel = schedule.program.problems[NAME].parallel
    assert parallel is not None
    recorded: Any = parallel.timeline()
    return Timeline(NAME, num_stages, tuple(Span(**span) for span in recorded["spans"])).seconds


def _schedule(ranks: Ranks, workload: AbstractWorkload, method: str, num_stages: int, record: int = 0) -> Schedule:
    # The tables say how well the stages are balanced.
    warnings.filterwarnings("ignore", message=r".*parallel\.cut: the longest of")
    settings = METHODS[method]
    model, cut = workload.make_cut(num_stages)
    parallel = Auxiliary(
        stages=num_stages,
        cut=list(cut),
        auxnet=None if settings["variables"] == "stored" else workload.make_auxnet(num_stages),
        beta=BETA,
        processes=ranks.size > 1,
        record=record,
        **settings,
    )

    def loss(batch: dict[str, Tensor], *, model: Any) -> Tensor:
        return workload.loss(model(batch["input"]), batch["target"])

    problem = Problem(
        NAME,
        model,
        loss,
        roles={"model": NAME},
        stream=Stream(InMemoryTensors(workload.samples()), workload.batch_size, shuffle=False),
        optimizer=workload.make_optimizer,
        parallel=parallel,
    )
    program = Program([problem], Graph(), ranks.reduce)
    distribute(program, ranks, seed=0)
    return Schedule(program)
