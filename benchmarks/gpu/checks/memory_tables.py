"""Tables 8 and 9 of Betty's paper (arXiv 2207.02849): memory of Meta-Weight-Net and DARTS, in fp32 and bf16.

The paper has, in MiB: MWN with ResNet-50 6817, in mixed precision 4397; DARTS 9867 and 5759.
"""

from functools import partial
from typing import Any

import torch

from benchmarks.betty.task import Task
from benchmarks.gpu.check import Check, Job
from benchmarks.gpu.cycles import compared, rivals_of
from benchmarks.harness.memory import peak_bytes
from benchmarks.harness.rounds import Cycle
from benchmarks.scaling.memory import IMAGE_SIZE, NUM_CLASSES, TASKS, row_of
from mlotool.core.gradient import autocast


def run(job: Job) -> None:
    """Measure the peak of whole cycles of Meta-Weight-Net, and of lower steps beside what is computed for them."""
    for precision in ("fp32", "bf16"):
        task = Task("resnet50", "fd", job.device.type, precision=precision, is_small=job.is_small)
        measure = partial(compared, job, task, rivals_of(job, task), is_timed=False)
        job.row(f"a cycle of MWN, ResNet-50, {precision}", measure, seconds=20.0)
    for name in TASKS:
        for precision in ("fp32", "bf16"):
            job.row(f"a lower step of {name}, {precision}", partial(_measured, job, name, precision), seconds=15.0)


def _measured(job: Job, name: str, precision: str) -> dict[str, Any]:
    batch_size = 2 if job.is_small else TASKS[name].batch_size
    peak = peak_bytes(partial(_step, job, name, precision, batch_size), on_cuda=not job.is_small)
    found = {"batch_size": batch_size, "peak_mib": peak / 2**20}
    if not job.is_small:
        found["computed_mib"] = row_of(name, precision, 1)["total"] / 2**20
    return found


def _step(job: Job, name: str, precision: str, batch_size: int) -> Cycle:
    task = TASKS[name]
    model = task.model().to(job.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    batch = {
        "input": torch.randn(batch_size, 3, IMAGE_SIZE, IMAGE_SIZE, device=job.device),
        "target": torch.randint(NUM_CLASSES, (batch_size,), device=job.device),
    }

    def step() -> None:
        with autocast(precision, job.device), torch.device(job.device):
            loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


CHECK = Check("Memory (Betty's Tables 8 and 9)", "memory", 30, 240.0, run)
