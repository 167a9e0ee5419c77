"""How equal the stages are, and what two of them hand over."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from benchmarks.layerparallel.pipeline import KINDS
from benchmarks.layerparallel.workload import AbstractWorkload
from mlotool.layerparallel.partition import Chain
from mlotool.layerparallel.partition.chain import imbalance, operations, seconds


def balance(workload: AbstractWorkload, num_ranks: int) -> dict[str, Any]:
    """Return the cut into a stage a rank, which all rivals have, and into two, which some pipelines have.

    Of each the cost of the busiest rank over the mean: by counted operations, and by time on one thread.
    """
    found = {"one stage a rank": _costs(workload, num_ranks, {"": [[rank] for rank in range(num_ranks)]})}
    ways = {
        name: [KINDS[kind].stages(rank, num_ranks) for rank in range(num_ranks)]
        for name, kind in (("loop", "interleaved 1F1B"), ("V", "zero bubble, V"))
    }
    try:
        found["two stages a rank"] = _costs(workload, 2 * num_ranks, ways)
    except ValueError as error:
        found["two stages a rank"] = {"not_run": str(error)}
    return found


def exchanged(workload: AbstractWorkload, num_ranks: int) -> dict[str, Any]:
    """Return how many numbers data parallelism averages a batch, and how many each stage hands to the next."""
    state: Tensor = next(workload.batches())[0]
    states = []
    for stage in workload.make_stages(num_ranks)[:-1]:
        state = stage(state).detach()
        states.append(state.numel())
    return {"parameters": sum(each.numel() for each in workload.make_model().parameters()), "states": states}


def _costs(workload: AbstractWorkload, num_stages: int, ways: dict[str, Sequence[Sequence[int]]]) -> dict[str, Any]:
    model, cut = workload.make_cut(num_stages)
    chain = Chain(model, inputs=(next(workload.batches())[0],))
    counted, timed = (chain.costs(cut, measure) for measure in (operations, seconds))

    def of_ranks(costs: Sequence[float]) -> dict[str, float]:
        sums = {way: [sum(costs[stage] for stage in own) for own in stages] for way, stages in ways.items()}
        return {way: round(imbalance(each), 3) for way, each in sums.items()}

    return {
        "cut": list(cut),
        "ms": [round(1e3 * each, 2) for each in timed],
        "operations": of_ranks(counted),
        "seconds": of_ranks(timed),
    }
