"""A run of a program that a script has made: alone, or on the ranks that torchrun has started."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mlotool.config import Built, Origin
from mlotool.distributed.collectives import Ranks
from mlotool.problem.rank_mean import identity_reduce
from mlotool.program import Program
from mlotool.runner.checkpoint import load_program
from mlotool.runner.process_settings import find_device, own_settings
from mlotool.runner.run_config import RunRequest, RunResult, World, joined, run_here
from mlotool.runner.session import OwnProcess


def fit_built(
    config: Any, built: Built, *, folder: Path | None, resume: str | Path | None, origin: Origin
) -> RunResult:
    """Train what a script has made; arguments, result and errors are those of `mlotool.fit`.

    Args:
        config: tells of the program.
        built: the program, the data, metrics, callbacks and loggers.
        folder: of the run; None makes one.
        resume: the run to go on with; None begins a new one.
        origin: the script.
    """
    runner, program, world = config.runner, built.program, World.find(os.environ)
    if world is not None:
        # Who starts a script says on how many processes.
        runner.devices = world.local_size
    with own_settings(runner, is_first=world is None or world.rank == 0):
        device = _device(runner, program, world)
        with joined(world, device) as ranks, _divided(program, ranks):
            try:
                request = RunRequest(config, folder, origin, resume=resume, made=built)
                result = run_here(request, device, ranks, OwnProcess(ranks))
            finally:
                # Lightning leaves modules and optimizers on the CPU.
                program.to(device)
            if result.had_finished and result.checkpoint is not None:
                load_program(program, result.checkpoint)
            elif ranks.size > 1 and not any(problem.settings.shard for problem in program.problems.values()):
                # The first one holds the best checkpoint.
                program.load_state_dict(ranks.first(program.state_dict()))
    return result


def _device(runner: Any, program: Program, world: World | None) -> torch.device:
    """Return where a program is to be: on the GPU on which it is, if its owner has put it on one."""
    if world is None and runner.accelerator == "auto" and len(program.devices) == 1:
        return program.devices[0]
    return find_device(runner, 0 if world is None else world.local_rank)


@contextmanager
def _divided(program: Program, ranks: Ranks) -> Iterator[None]:
    """Let a program take its means over ranks inside the block; outside, each rank's is its own again."""
    if ranks.reduce is not None:
        program.internals.engine.rank_mean.reduce = ranks.reduce
    try:
        yield
    finally:
        program.internals.engine.rank_mean.reduce = identity_reduce
