"""Runs a config: build, train, evaluate the best checkpoint, leave everything in the run folder."""

import json
import math
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import seed_everything

from mlotool.config import Origin, build, check, finish_provenance, load_run_config, trust_all
from mlotool.config.composition import check_composed, origin_of
from mlotool.core.arguments import is_number, require_path
from mlotool.core.errors import ConfigError, Interrupted, MlotoolError, RunError, RunFileError, WriteError
from mlotool.core.messages import is_command_line
from mlotool.distributed.collectives import Ranks
from mlotool.runner.folder import PATIENCE_S, RunFolder, run_lock
from mlotool.runner.launcher import INTERRUPTED, Launch, World, joined, launch, watch_parent
from mlotool.runner.loading import inherit
from mlotool.runner.plan import Watch
from mlotool.runner.process_settings import count_devices, find_device, own_settings
from mlotool.runner.resuming import EarlierRun, choose_checkpoint, find_run, go_on, say
from mlotool.runner.session import AbstractSeat, OwnProcess, Session


@dataclass(frozen=True)
class RunRequest:
    """One run, alone or among several of a process.

    Args:
        config: a composed config, which has been checked.
        output_dir: the run folder; None makes one.
        origin: where the config came from, for provenance.json; None takes what `compose` knows of it.
        watch: called with tick and objective at each evaluation of the objective; true ends the run as pruned.
        resume: the run to go on with, as for `mlotool.run`.
        when_created: called with the path of the run folder, once it is made.
        ended_at: among several, the tick at which the run ended in an earlier process, whose place it keeps; None where
            it is to run.
    """

    config: Any
    output_dir: Path | None = None
    origin: Origin | None = None
    watch: Watch | None = None
    resume: str | Path | None = None
    when_created: Callable[[str], object] | None = None
    ended_at: int | None = None


@dataclass(frozen=True)
class RunResult:
    """What a run leaves.

    Args:
        metrics: the last value of every logged key; those of `end` splits belong to the best checkpoint.
        output_dir: the run folder.
        checkpoint: the best checkpoint; the last one where no objective is tracked; None where none is kept.
        objective: the objective's value at the best checkpoint, else its last one.
        had_finished: whether it had finished before, so that nothing was done.
    """

    metrics: dict[str, float]
    output_dir: Path
    checkpoint: Path | None
    objective: float | None
    had_finished: bool = False


def run(
    config: Any,
    *,
    output_dir: Path | None = None,
    origin: Origin | None = None,
    resume: str | Path | None = None,
    watch: Watch | None = None,
    when_created: Callable[[str], object] | None = None,
) -> RunResult:
    """Train what a config describes.

    With `runner.devices` above 1 it starts that many processes and waits for them; where torchrun or SLURM has started
    this one among others, it joins them, and returns the same on all.

    Args:
        config: a composed config.
        output_dir: the run folder; None makes `outputs/<name>/<date>_<time>`.
        origin: where the config came from, for provenance.json; None takes what `compose` knows of it.
        resume: the run to go on with, bit-identically and in its own folder: a run folder, a checkpoint in one, or
            "auto", the newest unfinished run with the same config; None takes the config's `resume`.
        watch: called with tick and objective at each evaluation of the objective; true ends the run as pruned.
        when_created: called with the path of the run folder, once rank 0 has made it.

    Returns:
        Metrics, run folder, checkpoint and objective.

    Raises:
        ConfigError: the config cannot run.
        RunError: the run failed, e.g. NonFiniteLossError; last.ckpt in the run folder holds a good state from before.
        Interrupted: a KeyboardInterrupt after Ctrl-C or SIGTERM, once last.ckpt and summary.json are written.

    Example::

        result = mlotool.run(mlotool.compose("mwn", ["runner.max_ticks=100"]))
        result.metrics["val/accuracy"]
    """
    check_composed(config)
    require_path("run.output_dir", output_dir, "a path or null")
    if resume != "":
        require_path("run.resume", resume, "'auto', a run folder, a checkpoint in one or null", "auto")
    request = RunRequest(
        config, output_dir, origin, watch, config.get("resume") if resume is None else resume, when_created
    )
    runner, world = config.runner, World.find(os.environ)
    if world is not None:
        world.check_devices(runner.get("devices", 1))
    elif runner.get("devices", 1) != 1:
        if not is_command_line():
            # Its ranks would speak to the user of a command line.
            check(config, targets=True)
        if (num_ranks := count_devices(runner)) > 1:
            return _launched(request, num_ranks)
    with own_settings(runner, is_first=world is None or world.rank == 0):
        device = find_device(runner, 0 if world is None else world.local_rank)
        with joined(world, device) as ranks:
            return run_here(request, device, ranks, OwnProcess(ranks))


def _launched(request: RunRequest, num_ranks: int) -> RunResult:
    if request.watch is not None:
        warnings.warn(
            f"runner.devices: found {num_ranks} with a pruner; expected 1, since only then a run reports while it "
            "trains. It is not pruned: write sweep.pruner=none, or runner.devices=1.",
            stacklevel=3,
        )
    origin = _origin(request.config, request.origin)
    return RunResult(**launch(request.config, num_ranks, request.output_dir, origin, request.resume))


def run_here(request: RunRequest, device: torch.device, ranks: Ranks, seat: AbstractSeat) -> RunResult:
    """Run a config in a process that has been set up for it: torch's settings, signals, the ranks.

    Args:
        request: the run.
        device: where it computes.
        ranks: those of the run.
        seat: its place in the process.
    """
    config = request.config
    with ExitStack() as stack:
        resume = request.resume
        earlier = None if resume is None else ranks.of_first(lambda: find_run(config, resume, request.output_dir))
        if earlier is not None and earlier.is_finished:
            return _finished(earlier.folder, config, ranks)
        seed_everything(config.seed, workers=True, verbose=False)
        built = build(config, ranks.reduce, seat.shared)
        if config.get("inherit") is not None and (earlier is None or choose_checkpoint(earlier) is None):
            inherit(built.program, Path(config.inherit))
        # Everything that can be wrong with the config is found before a folder is made.
        session = Session(config, built, device, seat, ranks, request.watch)
        if earlier is None:
            session.rehearse()
        folder, checkpoint = ranks.of_first(lambda: _begin(request, built, earlier, stack, is_alone=ranks.size == 1))
        if ranks.is_first and request.when_created is not None:
            request.when_created(str(folder.path))
        try:
            summary = session.run(folder, checkpoint)
        except (RunError, Interrupted) as error:
            error.run_dir = folder.path
            raise
        finally:
            if ranks.is_first:
                # The run is done, or has an error of its own that matters more.
                with suppress(WriteError, RunFileError):
                    finish_provenance(folder.path)
        objective = summary["objective"]["value"]
        return ranks.first(RunResult(dict(summary["metrics"]), folder.path, folder.kept(), objective))


def _begin(
    request: RunRequest, built: Any, earlier: EarlierRun | None, stack: ExitStack, *, is_alone: bool
) -> tuple[RunFolder, Path | None]:
    """Return the folder, which the stack keeps locked, with its inputs, and the checkpoint to go on from."""
    config, origin = request.config, _origin(request.config, request.origin)
    if earlier is None:
        folder = RunFolder.create(config, request.output_dir, origin.sweep)
        stack.enter_context(run_lock(folder.path))
        folder.write_inputs(config, origin, built)
        return folder, None
    folder = RunFolder(earlier.folder.path, origin.sweep)
    if not stack.enter_context(run_lock(folder.path, PATIENCE_S)):
        raise ConfigError(
            f"resume: found '{folder.path}', which another process is writing; expected a run that has ended. Wait for "
            "it or stop it, or leave resume out for a new run."
        )
    if not folder.has_inputs:
        # It was killed while it wrote them.
        folder.write_inputs(config, origin, built)
    # Shards are put together by all ranks, and this is the first one's alone.
    return folder, go_on(earlier, config, origin, built.program if is_alone else None)


def _origin(config: Any, origin: Origin | None) -> Origin:
    return origin or origin_of(config) or Origin("mlotool.run", (), None)


def _finished(folder: RunFolder, config: Any, ranks: Ranks) -> RunResult:
    """Return the result of a run that has nothing left to do; its summary may be anybody's."""
    summary = folder.read_summary()
    if ranks.is_first:
        limit = config.debug.limit_ticks
        key = "runner.max_ticks" if limit is None or limit >= config.runner.max_ticks else "debug.limit_ticks"
        say(
            f"{folder.path} has finished after {summary['num_ticks']} ticks; nothing is changed. Raise {key} to go on, "
            "or leave resume out for a new run."
        )
    parts = {key: part if isinstance(part := summary.get(key), dict) else {} for key in ("metrics", "objective")}
    values = {key: float(value) if is_number(value) else math.nan for key, value in parts["metrics"].items()}
    value = parts["objective"].get("value")
    return RunResult(values, folder.path, folder.kept(), value if is_number(value) else None, had_finished=True)


def serve(folder: Path) -> int:
    """Run what a parent has requested, as the rank of the environment.

    Args:
        folder: of the launch.

    Returns:
        The exit code; the parent reports the error.
    """
    launch, rank = Launch(folder), int(os.environ["RANK"])
    watch_parent()
    with warnings.catch_warnings():
        if rank:
            # Rank 0 says it.
            warnings.simplefilter("ignore")
        try:
            request = launch.requested()
            # The parent may have found them in the folder of a script, or in a directory that it has left.
            sys.path += [home for home in request.trusted.values() if home is not None and home not in sys.path]
            trust_all(request.trusted)
            config, told = load_run_config(folder, is_own=True), launch.run_dir.write_text
            origin, output_dir, resume = request.origin, request.output_dir, request.resume
            result = run(config, output_dir=output_dir, origin=origin, resume=resume, when_created=told)
        except KeyboardInterrupt as interrupted:
            return getattr(interrupted, "exit_code", INTERRUPTED[0])
        except BaseException as error:
            launch.note_failure(rank, error, traceback.format_exc())
            return error.exit_code if isinstance(error, MlotoolError) else 1
    if rank == 0:
        launch.result.write_text(json.dumps(vars(result), default=str))
    return 0
