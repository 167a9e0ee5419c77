"""Before anything is timed: whether each rival computes what it should, in float64 on small batches."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.team import RankError, Team
from benchmarks.layerparallel import auxiliary, serial
from benchmarks.layerparallel.rivals import Rival
from benchmarks.layerparallel.workload import AbstractWorkload
from mlotool.distributed.collectives import Ranks

CHECKED_BATCH_SIZE, NUM_STEPS, LARGEST_DIFFERENCE = 8, 2, 1e-5
"""In float64: in float32 a ReLU that switches moves the second step's gradient by 2e-4."""

NORMALISES = "BatchNorm normalises by its running statistics there, since parts of a batch have others than the batch"


class WrongResultError(RuntimeError):
    """A rival computes something else than it should."""


def differences(
    team: Team, workload: AbstractWorkload, rivals: Mapping[str, Rival]
) -> tuple[dict[str, float], dict[str, str]]:
    """Return by name the largest relative difference of a rival, and why others are not to be timed.

    Data parallelism and pipelines are held to the gradients of serial training, mlotool's methods to the parameters
    that the same method has in one process.
    """
    exact = replace(workload, dtype=torch.float64, batch_size=CHECKED_BATCH_SIZE, num_batches=NUM_STEPS)
    expected = _gradients(serial.build(replace(exact, has_fixed_statistics=True), num_threads=1))
    found: dict[str, float] = {}
    refused: dict[str, str] = {}
    for name, rival in rivals.items():
        try:
            rival.check(team.num_ranks, workload, *rival.settings)
            found[name] = _held(_difference(team, exact, rival, expected))
            # The first step at full size: what is refused there is refused before anything is timed.
            team(_one_step, rival, replace(workload, num_batches=1))
        except (ValueError, RankError, WrongResultError) as error:
            refused[name] = _reason(error)
            print(f"{name} is not run: {refused[name]}", flush=True)
    return found, refused


def has_batch_norm(workload: AbstractWorkload) -> bool:
    """Say whether samples of a batch are coupled."""
    return any(isinstance(each, torch.nn.modules.batchnorm._BatchNorm) for each in workload.make_model().modules())


def _difference(team: Team, exact: AbstractWorkload, rival: Rival, expected: Sequence[Tensor]) -> float:
    if rival.is_serial:
        by_rank = team(_rank_gradients, rival, replace(exact, has_fixed_statistics=True))
        return max(_distance(each, expected) for each in _models(by_rank))
    here = auxiliary.trained(Ranks(), exact, *rival.settings)
    return max(_distance(each, here) for each in team(auxiliary.trained, exact, *rival.settings))


def _rank_gradients(ranks: Ranks, rival: Rival, workload: AbstractWorkload) -> list[dict[int, Tensor]]:
    """Return the gradients of a rank's stages at each step; a rank with the whole model has stage 0 alone."""
    cycle = rival.build(ranks, workload, *rival.settings)
    found = []
    for _ in range(NUM_STEPS):
        made = cycle()
        stages = made if isinstance(made, dict) else {0: made}
        found.append({number: _vector(each) for number, each in stages.items()})
    return found


def _models(by_rank: Sequence[Sequence[dict[int, Tensor]]]) -> list[list[Tensor]]:
    """Return the gradients of each whole model at each step: one of all ranks together, or each rank's."""
    numbers = [number for rank in by_rank for number in rank[0]]
    if len(set(numbers)) < len(numbers):
        return [[step[0] for step in rank] for rank in by_rank]
    joined = []
    for step in range(NUM_STEPS):
        stages = {number: part for rank in by_rank for number, part in rank[step].items()}
        joined.append(torch.cat([stages[number] for number in sorted(stages)]))
    return [joined]


def _one_step(ranks: Ranks, rival: Rival, workload: AbstractWorkload) -> None:
    rival.build(ranks, workload, *rival.settings)()


def _gradients(cycle: Callable[[], Sequence[Tensor]]) -> list[Tensor]:
    return [_vector(cycle()) for _ in range(NUM_STEPS)]


def _vector(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([each.detach().reshape(-1).clone() for each in parts])


def _distance(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    pairs = zip(found, expected, strict=True)
    return max(float((mine - one).norm() / one.norm()) for mine, one in pairs)


def _held(difference: float) -> float:
    if not difference <= LARGEST_DIFFERENCE:
        raise WrongResultError(
            f"found a relative difference of {difference:.1e}, where at most {LARGEST_DIFFERENCE} is expected"
        )
    return difference


def _reason(error: Any) -> str:
    """Return what a person needs of an error; of one on a rank the last line that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if "Error: " in line]
    return (named or lines or [type(error).__name__])[-1]
