"""What a rank sends in a cycle: ours counted, Betty's computed, and what leaving exchanges out does to the result."""

import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness.team import Team
from benchmarks.scaling.programs import UPPER, Workload, program
from mlotool.distributed.collectives import Ranks
from mlotool.problem.interface import Vector
from mlotool.program import Program, Schedule
from mlotool.runner.distributed import distribute

NUM_CYCLES = 5
DDP_FIRST_BUCKET_BYTES, DDP_BUCKET_BYTES = 2**20, 25 * 2**20
"""DistributedDataParallel's defaults; with find_unused_parameters, which Betty sets, buckets are not rebuilt."""
MOVED_CYCLES = 10
"""Cycles of the correct exchange before a hypergradient is compared: at the very start all weights are alike."""


def compare(team: Team, workload: Workload) -> dict[str, Any]:
    """Return the row of one workload."""
    made = program(workload)
    exact = Workload(workload.model, workload.algorithm, torch.float64)
    alone = hypergradient(Ranks(), exact, True)
    (everywhere, _), (at_the_end, _) = team(hypergradient, exact, True), team(hypergradient, exact, False)
    return {
        "model": workload.model,
        "algorithm": workload.algorithm,
        "counted": team(counted, workload)[0],
        "betty_computed": betty_computed(made),
        "error_of_hypergradient": {
            "exchanged everywhere": _error(everywhere, alone),
            "exchanged once at the end": _error(at_the_end, alone),
        },
    }


def counted(ranks: Ranks, workload: Workload) -> dict[str, float]:
    """Return what one rank hands to all-reduces, a cycle; the first cycle is not counted.

    The bytes are those of the tensors. At two ranks an all-reduce sends as many.
    """
    counts = {"means": 0.0, "all_reduces": 0.0, "bytes": 0.0, "seconds_in_mean": 0.0}
    all_reduce = dist.all_reduce

    def mean(vector: Vector) -> Vector:
        counts["means"] += 1
        began = time.perf_counter()
        found = ranks.mean(vector)
        counts["seconds_in_mean"] += time.perf_counter() - began
        return found

    def watched(tensor: Tensor, *arguments: Any, **settings: Any) -> Any:
        counts["all_reduces"] += 1
        counts["bytes"] += tensor.numel() * tensor.element_size()
        return all_reduce(tensor, *arguments, **settings)

    made = program(workload, mean)
    distribute(made, ranks, seed=0)
    steps = Schedule(made)
    steps.tick()
    counts.update(dict.fromkeys(counts, 0.0))
    with mock.patch.object(dist, "all_reduce", watched):
        began = time.perf_counter()
        for _ in range(NUM_CYCLES):
            steps.tick()
        counts["seconds"] = time.perf_counter() - began
    return {name: count / NUM_CYCLES for name, count in counts.items()}


def betty_computed(made: Program) -> dict[str, int]:
    """Return what Betty 0.2.1 (strategy "distributed") hands to all-reduces in the same cycle; nothing is run.

    Each problem's module is a DistributedDataParallel with find_unused_parameters. It exchanges where a gradient is
    accumulated into `.grad`: the lower loss's (`Problem.backward`), and the upper gradient at the end of `get_grads`.
    The upper loss's gradient at the lower parameters and all Hessian-vector products are `torch.autograd.grad`, which
    it does not see. A backward pass also exchanges an int32 a parameter tensor: which ones were used. Modules with
    buffers broadcast them in each forward pass as well; these have none.
    """
    num_bytes = num_all_reduces = 0
    for problem in made.problems.values():
        tensors = list(problem.theta.values())
        num_bytes += sum(each.numel() * each.element_size() for each in tensors) + 4 * len(tensors)
        num_all_reduces += _num_ddp_buckets(tensors) + 1
    return {"all_reduces": num_all_reduces, "bytes": num_bytes}


def hypergradient(ranks: Ranks, workload: Workload, is_exchanged_everywhere: bool) -> Tensor:
    """Return the upper gradient after some cycles, which are those of one rank.

    Args:
        ranks: all of them.
        workload: in float64.
        is_exchanged_everywhere: as mlotool does; else the final gradient alone, as Betty does.
    """
    made = program(workload, ranks.reduce)
    distribute(made, ranks, seed=0)
    steps = Schedule(made)
    for _ in range(MOVED_CYCLES):
        steps.tick()
    if not is_exchanged_everywhere:
        shapes = [tensor.shape for tensor in made.problems[UPPER].theta.values()]

        def mean_of_the_end(vector: Vector) -> Vector:
            return ranks.mean(vector) if [tensor.shape for tensor in vector] == shapes else vector

        made = Program(made.problems.values(), made.graph, mean_of_the_end)
    return torch.cat([each.detach().reshape(-1) for each in made.gradient(UPPER).values()])


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def _num_ddp_buckets(tensors: Sequence[Tensor]) -> int:
    limits = [DDP_FIRST_BUCKET_BYTES, DDP_BUCKET_BYTES]
    return len(dist._compute_bucket_assignment_by_size(list(tensors), limits)[0])
