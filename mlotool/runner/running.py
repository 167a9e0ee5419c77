"""Runs a config: build, train, evaluate the best checkpoint, leave everything in the run folder."""

import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytorch_lightning import seed_everything

from mlotool.config import Origin, build, finish_provenance, note_resume
from mlotool.config.composition import origin_of
from mlotool.core.errors import ConfigError, Interrupted, RunError
from mlotool.runner.device import find_device
from mlotool.runner.folder import RunFolder
from mlotool.runner.objective import Watch
from mlotool.runner.resuming import Found, find_run, prepare, read_summary, say
from mlotool.runner.run_lock import PATIENCE_S, run_lock
from mlotool.runner.session import Session
from mlotool.runner.surroundings import quiet_lightning, terminable, torch_settings


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
) -> RunResult:
    """Train what a config describes.

    Args:
        config: a composed config.
        output_dir: the run folder; None makes `outputs/<name>/<date>_<time>`.
        origin: where the config came from, for provenance.json; None takes what `compose` knows of it.
        resume: the run to go on with, bit-identically and in its own folder: a run folder, a checkpoint in one, or
            "auto", the newest unfinished run with the same config; None takes the config's `resume`.
        watch: called with tick and objective at each evaluation of the objective; true ends the run as pruned.

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
    runner, origin = config.runner, origin or origin_of(config) or Origin("mlotool.run", (), None)
    resume = config.get("resume") if resume is None else resume
    found = None if resume is None else find_run(config, resume, output_dir)
    if found is not None and found.is_finished:
        return _finished(found)
    with (
        torch_settings(**{key: runner[key] for key in ("num_threads", "deterministic", "tf32")}),
        quiet_lightning(),
        terminable(),
        ExitStack() as stack,
    ):
        device = find_device(runner)
        seed_everything(config.seed, workers=True, verbose=False)
        built = build(config)
        # Everything that can be wrong with the config is found before a folder is made.
        session = Session(config, built, device, watch)
        checkpoint: Path | None = None
        if found is None:
            folder = RunFolder.create(config, output_dir)
            stack.enter_context(run_lock(folder.path))
            folder.write_inputs(config, origin, built.program.graph)
        else:
            folder = found.folder
            _lock(folder, stack)
            if not (folder.path / "provenance.json").exists():
                # It was killed while it wrote them; provenance.json is the last.
                folder.write_inputs(config, origin, built.program.graph)
            checkpoint = _go_on(found, config, origin)
        try:
            outcome = session.run(folder, checkpoint)
        except RunError as error:
            error.run_dir = folder.path
            raise
        except Interrupted as interrupted:
            interrupted.run_dir = folder.path
            raise
        finally:
            finish_provenance(folder.path)
    return RunResult(outcome.metrics, folder.path, _kept(folder), outcome.objective)


def _kept(folder: RunFolder) -> Path | None:
    return next((path for path in map(folder.checkpoint, ("best", "last")) if path.is_file()), None)


def _lock(folder: RunFolder, stack: ExitStack) -> None:
    if not stack.enter_context(run_lock(folder.path, PATIENCE_S)):
        raise ConfigError(
            f"resume: found '{folder.path}', which another process is writing; expected a run that has ended. Wait for "
            "it or stop it, or leave resume out for a new run."
        )


def _go_on(found: Found, config: Any, origin: Origin) -> Path | None:
    """Make the folder ready, note the resume and tell of it; return the checkpoint, if there is one."""
    path = found.folder.path
    checkpoint, tick = prepare(found, config)
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


def _finished(found: Found) -> RunResult:
    path, summary = found.folder.path, read_summary(found.folder.path)
    say(
        f"{path} has finished after {summary['num_ticks']} ticks; nothing is changed. Raise runner.max_ticks to go on, "
        "or leave resume out for a new run."
    )
    metrics = {key: float("nan") if value is None else value for key, value in summary["metrics"].items()}
    return RunResult(metrics, path, _kept(found.folder), summary["objective"]["value"], had_finished=True)
