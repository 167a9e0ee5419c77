"""Runs a config: build, train, evaluate the best checkpoint, leave everything in the run folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytorch_lightning import seed_everything

from mlotool.config import Origin, build, finish_provenance
from mlotool.config.composition import origin_of
from mlotool.core.errors import RunError
from mlotool.runner.device import find_device
from mlotool.runner.folder import RunFolder
from mlotool.runner.objective import Watch
from mlotool.runner.session import Session
from mlotool.runner.surroundings import quiet_lightning, torch_settings


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
    config: Any, *, output_dir: Path | None = None, origin: Origin | None = None, watch: Watch | None = None
) -> RunResult:
    """Train what a config describes.

    Args:
        config: a composed config.
        output_dir: the run folder; None makes `outputs/<name>/<date>_<time>`.
        origin: where the config came from, for provenance.json; None takes what `compose` knows of it.
        watch: called with tick and objective at each evaluation of the objective; true ends the run as pruned.

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
    runner = config.runner
    settings = {key: runner[key] for key in ("num_threads", "deterministic", "tf32")}
    with torch_settings(**settings), quiet_lightning():
        device = find_device(runner)
        seed_everything(config.seed, workers=True, verbose=False)
        built = build(config)
        # Everything that can be wrong with the config is found before a folder is made.
        session = Session(config, built, device, watch)
        folder = RunFolder.create(config, output_dir)
        folder.write_inputs(config, origin or origin_of(config), built.program.graph)
        try:
            outcome = session.run(folder)
        except RunError as error:
            error.run_dir = folder.path
            raise
        finally:
            finish_provenance(folder.path)
    kept = [path for path in map(folder.checkpoint, ("best", "last")) if path.is_file()]
    return RunResult(outcome.metrics, folder.path, kept[0] if kept else None, outcome.objective)
