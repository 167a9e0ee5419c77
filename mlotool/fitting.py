"""`mlotool.fit`: a program that a script has made gets all that a recipe's run has, its page included."""

import os
import shlex
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlotool.config import Origin
from mlotool.config.given_program import built_from
from mlotool.core.arguments import require, require_path
from mlotool.core.errors import MlotoolError, RunError, WriteError
from mlotool.program import Program
from mlotool.runner import RunResult, fit_built

if TYPE_CHECKING:
    from pytorch_lightning.loggers import Logger


def fit(
    program: Program,
    ticks: int | None = None,
    *,
    data: Any = None,
    evaluate: Mapping[str, Any] | None = None,
    objective: str | None = None,
    logger: "Logger | Sequence[Logger] | Mapping[str, Any] | None" = None,
    folder: str | Path | None = None,
    resume: str | Path | None = None,
    **settings: Any,
) -> RunResult:
    """Train a program, and write a run folder with metrics.csv, checkpoints, summary.json and report.html.

    The arguments have the meaning, types, ranges and defaults of the keys of a recipe with the same names. Each loss
    and metric is evaluated once before the first tick, to find errors early. Afterwards the program holds the
    parameters of the best checkpoint, if `objective` is evaluated during training, and else those of the last tick. If
    torchrun has started several processes of the script, they share each batch, and all return the same result.

    Args:
        program: the problems and their graph; each problem needs an optimizer.
        ticks: length of the run; a tick is one optimizer step of each lowest-level problem, and of the problems above
            that are due then. None: 1000.
        data: the data to evaluate on: data sets by the names of their splits, or an object with `splits` and
            `split(name)`.
        evaluate: `{"problem": "classifier", "metrics": ["accuracy", my_metric], "splits": {"val": 100, "test":
            "end"}}`; a metric is a name, or a function `f(module, batch) -> {name: tensor}`.
        objective: the metric that the best checkpoint is chosen by: "val/accuracy".
        logger: a logger of Lightning or a list of them; or a mapping with the keys of a recipe's `logger`.
        folder: the run folder; None makes `outputs/<name>/<date>_<time>`.
        resume: the run to resume, with bit-identical results: a run folder, a checkpoint in one, or "auto" for the
            newest unfinished run with the same program and settings. The script has to make the same program as before.
        **settings: keys of a recipe's `runner`, such as `log_every=10`, `early_stopping_patience=5`, `report=False`, or
            `callbacks=[...]` with callbacks of Lightning; `objective_mode="max"` or "min", for your own metrics; `name`
            of the run, by default that of the script; and `seed`, for random numbers that the run itself draws on
            several ranks (parameters, batches and dropout have been seeded by the script).

    Returns:
        Metrics, run folder, checkpoint and objective, as from `mlotool.run`.

    Raises:
        ConfigError: an argument is wrong, or a loss or metric fails when it is first evaluated; nothing has been
            written.
        RunError: the run failed, for example with NonFiniteLossError; last.ckpt in the run folder holds a good state
            from before the failure.
        Interrupted: a KeyboardInterrupt after Ctrl-C or SIGTERM, once last.ckpt and summary.json are written.

    Example::

        result = mlotool.fit(program, ticks=1000)
        result.metrics["classifier/loss"], result.output_dir
    """
    advice = "Write mlotool.fit(mlotool.Program(problems, graph), ticks=1000)."
    require(isinstance(program, Program), "fit.program", program, "a Program", advice)
    require_path("fit.folder", folder, "a path or null")
    require_path("fit.resume", resume, "'auto', a run folder, a checkpoint in one or null", "auto")
    given = {"ticks": ticks, "evaluate": evaluate, "objective": objective, "logger": logger}
    config, built, warned = built_from(program, data, {**given, **settings})
    if data is not None and evaluate is None:
        warned.append(
            "fit.data: found data without evaluate, so that nothing uses it. Add evaluate, or leave data out."
        )
    is_first = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"
    for text in warned if is_first else ():
        warnings.warn(text, stacklevel=2)
    origin = Origin(shlex.join([Path(sys.executable).name, *sys.argv]), (), None)
    writes_page = config.runner.report and is_first
    try:
        result = fit_built(config, built, folder=None if folder is None else Path(folder), resume=resume, origin=origin)
    except WriteError:
        # The disk that does not take the run's files would not take its page.
        raise
    except RunError as error:
        if writes_page and error.run_dir is not None:
            _write_page(error.run_dir)
        raise
    if writes_page and not result.had_finished:
        _write_page(result.output_dir)
    return result


def _write_page(run_dir: Path) -> None:
    """Write report.html; a failure is a warning, for the run itself is done."""
    # Imported here: it takes a second, which the run need not wait for.
    from mlotool.report import write_report

    write: Callable[[Path], Path] = write_report
    try:
        write(run_dir)
    except KeyboardInterrupt:
        # Where warnings are errors, Ctrl-C stays what is raised.
        with suppress(Warning):
            warnings.warn(f"The run has ended; only its report is missing: mlotool report {run_dir}", stacklevel=3)
        raise
    except Exception as error:
        reason = str(error) if isinstance(error, MlotoolError) else f"{type(error).__name__}: {error}"
        warnings.warn(f"The report could not be written ({reason}); try again: mlotool report {run_dir}", stacklevel=3)
