"""Runs a config: build, train, evaluate the best checkpoint, leave everything in the run folder."""

import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import seed_everything

from mlotool.config import Origin, build, check, finish_provenance, load_run_config, note_resume, trust_all
from mlotool.config.composition import check_composed, origin_of
from mlotool.config.run_config import read_summary
from mlotool.core.arguments import require, require_path
from mlotool.core.errors import ConfigError, Interrupted, MlotoolError, RunError, RunFileError, WriteError
from mlotool.core.messages import is_command_line
from mlotool.core.process import terminable
from mlotool.distributed.collectives import Ranks
from mlotool.program import Program
from mlotool.runner.folder import PATIENCE_S, RunFolder, run_lock
from mlotool.runner.launcher import INTERRUPTED, Launch, World, joined, launch, watch_parent
from mlotool.runner.plan import Watch
from mlotool.runner.process_settings import announcements, count_devices, find_device, quiet_lightning, torch_settings
from mlotool.runner.records import write_nodes
from mlotool.runner.resuming import Found, choose_checkpoint, find_run, inherit, prepare, say
from mlotool.runner.seat import AbstractSeat
from mlotool.runner.session import Session


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
    require(isinstance(origin, Origin | None), "run.origin", origin, "an Origin, or null", "Leave it out.")
    for name, function in {"watch": watch, "when_created": when_created}.items():
        require(function is None or callable(function), f"run.{name}", function, "a function, or null", "Leave it out.")
    if resume != "":
        require_path("run.resume", resume, "'auto', a run folder, a checkpoint in one or null", "auto")
    runner, world = config.runner, World.find(os.environ)
    resume = config.get("resume") if resume is None else resume
    if world is None and (num_ranks := count_devices(runner)) > 1:
        if watch is not None:
            warnings.warn(
                f"runner.devices: found {num_ranks} with a pruner; expected 1, since only then a run reports while it "
                "trains. It is not pruned: write sweep.pruner=none, or runner.devices=1.",
                stacklevel=2,
            )
        if not is_command_line():
            # Its ranks would speak to the user of a command line.
            check(config, targets=True)
        known = origin or origin_of(config) or Origin("mlotool.run", (), None)
        return RunResult(**launch(config, num_ranks, output_dir, known, resume))
    if world is not None:
        world.check_devices(runner.devices if "devices" in runner else 1)
    with (
        torch_settings(**{key: runner[key] for key in ("num_threads", "deterministic", "tf32")}),
        # A profiler and a summary speak by Lightning's own voice.
        nullcontext() if runner.get("trainer") else quiet_lightning(),
        terminable(),
    ):
        device = find_device(runner, 0 if world is None else world.local_rank)
        with joined(world, device) as ranks, announcements() if ranks.is_first else nullcontext():
            return run_here(RunRequest(config, output_dir, origin, watch, resume, when_created), device, ranks)


def run_here(request: RunRequest, device: torch.device, ranks: Ranks, seat: AbstractSeat | None = None) -> RunResult:
    """Run a config in a process that has been set up for it: torch's settings, signals, the ranks.

    Args:
        request: the run.
        device: where it computes.
        ranks: those of the run.
        seat: takes the ticks of a run that shares its process with others; None lets the run take them by itself.
    """
    config, output_dir, resume = request.config, request.output_dir, request.resume
    origin = request.origin or origin_of(config) or Origin("mlotool.run", (), None)
    with ExitStack() as stack:
        found = None if resume is None else ranks.of_first(lambda: find_run(config, resume, output_dir))
        if found is not None and found.is_finished:
            return _finished(found, config, ranks)
        seed_everything(config.seed, workers=True, verbose=False)
        built = build(config, ranks.reduce, None if seat is None else seat.shared)
        if config.get("inherit") is not None and (found is None or choose_checkpoint(found) is None):
            inherit(built.program, Path(config.inherit))
        # Everything that can be wrong with the config is found before a folder is made.
        session = Session(config, built, device, request.watch, ranks, seat)
        if found is None:
            session.rehearse()
        folder, checkpoint = ranks.of_first(
            lambda: _begin(config, output_dir, origin, built, found, stack, is_alone=ranks.size == 1)
        )
        if ranks.is_first and request.when_created is not None:
            request.when_created(str(folder.path))
        return _run(session, folder, checkpoint, ranks)


def _begin(
    config: Any,
    output_dir: Path | None,
    origin: Origin,
    built: Any,
    found: Found | None,
    stack: ExitStack,
    *,
    is_alone: bool,
) -> tuple[RunFolder, Path | None]:
    """Return the folder, which the stack keeps locked, with its inputs, and the checkpoint to go on from."""
    if found is None:
        folder = RunFolder.create(config, output_dir, origin.sweep)
        stack.enter_context(run_lock(folder.path))
        _write_inputs(folder, config, origin, built)
        return folder, None
    folder = RunFolder(found.folder.path, origin.sweep)
    _lock(folder, stack)
    if not (folder.path / "provenance.json").exists():
        # It was killed while it wrote them; provenance.json is the last.
        _write_inputs(folder, config, origin, built)
    # Shards are put together by all ranks, and this is the first one's alone.
    return folder, _go_on(found, config, origin, built.program if is_alone else None)


def _write_inputs(folder: RunFolder, config: Any, origin: Origin, built: Any) -> None:
    # provenance.json is the last: a folder that has it is complete.
    write_nodes(folder.path, built)
    folder.write_inputs(config, origin, built.program.graph)


def _run(session: Session, folder: RunFolder, checkpoint: Path | None, ranks: Ranks) -> RunResult:
    is_disk_at_fault = False
    try:
        outcome = session.run(folder, checkpoint)
    except RunError as error:
        error.run_dir, is_disk_at_fault = folder.path, isinstance(error, WriteError)
        raise
    except Interrupted as interrupted:
        interrupted.run_dir = folder.path
        raise
    finally:
        if ranks.is_first:
            _finish_provenance(folder.path, is_told=is_disk_at_fault)
    return ranks.first(RunResult(outcome.metrics, folder.path, _kept(folder), outcome.objective))


def _finish_provenance(run_dir: Path, *, is_told: bool) -> None:
    """Write the end's time; `is_told`: the run's own error says already that the disk takes no files."""
    try:
        finish_provenance(run_dir)
    except (WriteError, RunFileError) as error:
        # The run is done, or has an error of its own that matters more.
        if not is_told:
            warnings.warn(str(error), stacklevel=2)


def _kept(folder: RunFolder) -> Path | None:
    return next((path for path in map(folder.checkpoint, ("best", "last")) if path.is_file()), None)


def _lock(folder: RunFolder, stack: ExitStack) -> None:
    if not stack.enter_context(run_lock(folder.path, PATIENCE_S)):
        raise ConfigError(
            f"resume: found '{folder.path}', which another process is writing; expected a run that has ended. Wait for "
            "it or stop it, or leave resume out for a new run."
        )


def _go_on(found: Found, config: Any, origin: Origin, program: Program | None) -> Path | None:
    """Make the folder ready, note the resume and tell of it; return the checkpoint, if there is one."""
    path = found.folder.path
    checkpoint, tick = prepare(found, config, program)
    for change in note_resume(path, config, origin, tick):
        warnings.warn(
            f"resume: found {change}; expected the same, or the numbers may not be the same to the last bit. Go on "
            "where the run began, if that matters.",
            stacklevel=3,
        )
    if checkpoint is None:
        say(f"{path} has no checkpoint yet: it begins again.")
    else:
        say(f"going on in {path} after tick {tick} ({checkpoint.name})")
    return checkpoint


def _finished(found: Found, config: Any, ranks: Ranks) -> RunResult:
    path, summary = found.folder.path, read_summary(found.folder.path)
    if ranks.is_first:
        limit = config.debug.limit_ticks
        key = "runner.max_ticks" if limit is None or limit >= config.runner.max_ticks else "debug.limit_ticks"
        say(
            f"{path} has finished after {summary['num_ticks']} ticks; nothing is changed. Raise {key} to go on, or "
            "leave resume out for a new run."
        )
    metrics, objective = summary.get("metrics"), summary.get("objective")
    # The summary may be anybody's.
    values = {key: _number(value) for key, value in metrics.items()} if isinstance(metrics, dict) else {}
    value = objective.get("value") if isinstance(objective, dict) else None
    is_known = isinstance(value, int | float)
    return RunResult(values, path, _kept(found.folder), value if is_known else None, had_finished=True)


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")


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
            output_dir, origin, packages, resume = launch.requested()
            # The parent may have found them in the folder of a script, or in a directory that it has left.
            sys.path += [folder for folder in packages.values() if folder is not None and folder not in sys.path]
            trust_all(packages)
            result = run(
                load_run_config(folder, is_own=True),
                output_dir=output_dir,
                origin=origin,
                resume=resume,
                when_created=launch.run_dir.write_text,
            )
        except KeyboardInterrupt as interrupted:
            return interrupted.exit_code if isinstance(interrupted, Interrupted) else INTERRUPTED[0]
        except BaseException as error:
            launch.note_failure(rank, error, traceback.format_exc())
            return error.exit_code if isinstance(error, MlotoolError) else 1
    if rank == 0:
        checkpoint = None if result.checkpoint is None else str(result.checkpoint)
        launch.result.write_text(
            json.dumps({**vars(result), "output_dir": str(result.output_dir), "checkpoint": checkpoint})
        )
    return 0
