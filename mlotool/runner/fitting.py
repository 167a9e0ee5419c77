"""A run of a program that a script has made: alone, or on the ranks that torchrun has started."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from mlotool.config import Built, Origin
from mlotool.config.user_data import split_of
from mlotool.core.errors import ConfigError
from mlotool.core.random_stream import own_random
from mlotool.core.user_code import user_code
from mlotool.distributed.collectives import Ranks
from mlotool.problem.rank_mean import identity_reduce
from mlotool.program import Program
from mlotool.runner.checkpoint import load_program
from mlotool.runner.evaluation import CLASSIFICATION_METRICS, NUM_REHEARSED, Batches, make_evaluator
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
                _count_classes(config, built)
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


def _count_classes(config: Any, built: Built) -> None:
    """Take the number of classes from the logits (b, c, ...), where metrics need it and the data do not tell."""
    evaluate, data = config.evaluate, built.data
    if evaluate is None or not {*CLASSIFICATION_METRICS} & {*filter(_is_text, evaluate.metrics)} or not evaluate.splits:
        return
    if getattr(data, "num_classes", None) is not None:
        return
    evaluator = make_evaluator(OmegaConf.merge(config, {"evaluate": {"metrics": []}}), replace(built, metrics={}))
    assert evaluator is not None
    split = next(iter(evaluate.splits))
    with user_code(ConfigError), own_random(), torch.no_grad():
        place = next(built.program.problems[evaluate.problem].module.parameters()).device
        [batch] = Batches(split_of("evaluate.splits", data, split), NUM_REHEARSED, place, NUM_REHEARSED)
        is_named = isinstance(batch, Mapping) and "input" in batch
        logits = evaluator.model()(batch["input"]) if is_named else None
    if isinstance(logits, torch.Tensor) and logits.is_floating_point() and logits.dim() > 1:
        data.num_classes = logits.shape[1]


def _is_text(metric: Any) -> bool:
    return isinstance(metric, str)
