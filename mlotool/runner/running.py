"""Runs a config: build, train, evaluate the best checkpoint, leave everything in the run folder."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import seed_everything

from mlotool.config import Origin, build, finish_provenance
from mlotool.config.composition import origin_of
from mlotool.core.errors import RunError
from mlotool.runner.device import count_devices, find_device
from mlotool.runner.folder import RunFolder
from mlotool.runner.launcher import launch
from mlotool.runner.ranks import Ranks, joined
from mlotool.runner.session import Session
from mlotool.runner.surroundings import quiet_lightning, torch_settings
from mlotool.runner.world import World


@dataclass(frozen=True)
class RunResult:
    """What a run leaves.

    Args:
        metrics: the last value of every logged key; those of `end` splits belong to the best checkpoint.
        output_dir: the run folder.
        checkpoint: the best checkpoint; the last one where no objective is tracked; None where none is kept.
        objective: the objective's value at the best checkpoint, else its last one.
    """

    metrics: dict[str, float]
    output_dir: Path
    checkpoint: Path | None
    objective: float | None


def run(
    config: Any,
    *,
    output_dir: Path | None = None,
    origin: Origin | None = None,
    when_created: Callable[[str], object] | None = None,
) -> RunResult:
    """Train what a config describes.

    With `runner.devices` above 1 it starts that many processes and waits for them; where torchrun or SLURM has started
    this one among others, it joins them, and returns the same on all.

    Args:
        config: a composed config.
        output_dir: the run folder; None makes `outputs/<name>/<date>_<time>`.
        origin: where the config came from, for provenance.json; None takes what `compose` knows of it.
        when_created: called with the path of the run folder, once rank 0 has made it.

    Returns:
        Metrics, run folder, checkpoint and objective.

    Raises:
        ConfigError: the config cannot run.
        RunError: the run failed, e.g. NonFiniteLossError; last.ckpt in the run folder holds a good state from before.
        KeyboardInterrupt: after Ctrl-C, once last.ckpt and summary.json are written.

    Example::

        result = mlotool.run(mlotool.compose("mwn", ["runner.max_ticks=100"]))
        result.metrics["val/accuracy"]
    """
    runner, world = config.runner, World.find(os.environ)
    origin = origin or origin_of(config) or Origin("mlotool.run", (), None)
    if world is None and (num_ranks := count_devices(runner)) > 1:
        found = launch(config, num_ranks, output_dir, origin)
        checkpoint = None if found["checkpoint"] is None else Path(found["checkpoint"])
        return RunResult(found["metrics"], Path(found["output_dir"]), checkpoint, found["objective"])
    if world is not None:
        world.check_devices(runner.devices if "devices" in runner else 1)
    with torch_settings(num_threads=runner.num_threads, deterministic=runner.deterministic), quiet_lightning():
        device = find_device(runner, 0 if world is None else world.local_rank)
        with joined(world, device) as ranks:
            return _run(config, output_dir, origin, device, ranks, when_created)


def _run(
    config: Any,
    output_dir: Path | None,
    origin: Origin,
    device: torch.device,
    ranks: Ranks,
    when_created: Callable[[str], object] | None,
) -> RunResult:
    seed_everything(config.seed, workers=True, verbose=False)
    built = build(config)
    # Everything that can be wrong with the config is found before a folder is made.
    session = Session(config, built, device, ranks)
    folder = ranks.of_first(lambda: RunFolder.create(config, output_dir, origin.sweep))
    if ranks.is_first:
        folder.write_inputs(config, origin, built.program.graph)
        if when_created is not None:
            when_created(str(folder.path))
    try:
        outcome = session.run(folder)
    except RunError as error:
        error.run_dir = folder.path
        raise
    finally:
        if ranks.is_first:
            finish_provenance(folder.path)
    kept = [path for path in map(folder.checkpoint, ("best", "last")) if path.is_file()]
    return ranks.first(RunResult(outcome.metrics, folder.path, kept[0] if kept else None, outcome.objective))
