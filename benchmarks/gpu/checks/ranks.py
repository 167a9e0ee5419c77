"""Two ranks against one: NCCL where there are two GPUs, else gloo with both ranks' tensors on the one device."""

import os
import socket
from functools import partial
from typing import Any

import torch
import torch.multiprocessing

from benchmarks.gpu.check import Check, Job
from benchmarks.scaling.programs import ALGORITHMS, LOWER, UPPER, Workload, program
from mlotool.distributed.collectives import Ranks
from mlotool.program import Schedule
from mlotool.runner.distributed import distribute
from mlotool.runner.run_config import World, joined

NUM_RANKS, NUM_TICKS = 2, 3


def run(job: Job) -> None:
    """A row for each hypergradient, in float64."""
    for algorithm in ALGORITHMS:
        job.row(algorithm, partial(_compared, job, algorithm), seconds=20.0)


def _compared(job: Job, algorithm: str) -> dict[str, Any]:
    workload = Workload("mlp", algorithm, torch.float64)
    has_gpus = job.device.type == "cuda" and torch.cuda.device_count() >= NUM_RANKS
    origin, alone = (_trained(Ranks(), workload, job.device, ticks) for ticks in (0, NUM_TICKS))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    job.folder.mkdir(parents=True, exist_ok=True)
    folder = str(job.folder)
    torch.multiprocessing.spawn(_rank, (port, workload, job.device.type, has_gpus, folder), nprocs=NUM_RANKS)
    both = [torch.load(job.folder / f"rank_{rank}.pt") for rank in range(NUM_RANKS)]
    difference = max(
        float((mine - one.cpu()).norm() / (one - begin).norm())
        for found in both
        for mine, one, begin in zip(found, alone, origin, strict=True)
    )
    if not difference < 1e-8:
        raise AssertionError(f"two ranks are off by {difference:.1e} of how far one has moved; expected rounding")
    return {"transport": "nccl" if has_gpus else "gloo", "difference": difference}


def _rank(rank: int, port: int, workload: Workload, kind: str, has_gpus: bool, folder: str) -> None:
    torch.set_num_threads(1)
    device = torch.device(kind, rank if has_gpus else 0) if kind == "cuda" else torch.device("cpu")
    # The group's transport follows from the device that it is told.
    told = device if has_gpus else torch.device("cpu")
    with joined(World(rank, NUM_RANKS, rank, NUM_RANKS, "127.0.0.1", port), told) as ranks:
        found = _trained(ranks, workload, device, NUM_TICKS)
    torch.save([each.cpu() for each in found], f"{folder}/rank_{rank}.pt")


def _trained(ranks: Ranks, workload: Workload, device: torch.device, num_ticks: int) -> list[torch.Tensor]:
    made = program(workload, ranks.reduce)
    for problem in made.problems.values():
        problem.module.to(device)
        problem.stream.to(device, workload.dtype)
    distribute(made, ranks, seed=0)
    schedule = Schedule(made)
    for _ in range(num_ticks):
        schedule.tick()
    problems = made.problems
    return [torch.cat([each.detach().reshape(-1) for each in problems[name].theta.values()]) for name in (LOWER, UPPER)]


CHECK = Check("Two ranks against one", "multi", 60, 120.0, run)
