"""One job of `mlotool run`: check, train, report. Hydra calls it, once or for every job of a sweep."""

import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from mlotool import config as configuration
from mlotool.cli.arguments import take_trust
from mlotool.cli.terminal import nearby, plain_console, print_lines, say, warn
from mlotool.config.composition import finish, later_words
from mlotool.config.schema import wandb_mode
from mlotool.core.errors import MlotoolError, RunError, WriteError
from mlotool.core.process import import_large, import_torch
from mlotool.folders.run_folder import RunFolder, is_stamp
from mlotool.sweep.folder import note_failure

if TYPE_CHECKING:
    from mlotool.runner import RunResult
    from mlotool.runner.evaluation import Watch


@dataclass
class Job:
    """What Hydra calls with each composed config.

    Errors are kept in `errors`, not raised: Hydra would announce them in its own words, and stop a sweep's summary.

    Args:
        command: the command line, for provenance.json.
        words: recipe and overrides, those of all jobs of a sweep.
        recipe_file: of a recipe that was given by its path.
        trusted: packages of the user's that recipes may use.
        watch: sees the objective at each evaluation, and may end the run as pruned.

    Attributes:
        errors: those of all jobs, in order.
        sweep_dir: the folder of the sweep; None in a single run.
    """

    command: str
    words: Sequence[str]
    recipe_file: Path | None = None
    trusted: tuple[str, ...] = ()
    errors: list[Exception] = field(default_factory=list)
    sweep_dir: Path | None = None
    watch: "Watch | None" = None

    def __call__(self, config: Any) -> float | None:
        """Run one job; return its objective, or NaN where it failed."""
        # A launcher may have carried this object into another process.
        take_trust(self.trusted)
        hydra = HydraConfig.get()
        run_dir = Path(hydra.runtime.output_dir)
        # Not as they are read: one with a reference in it would be resolved, or fail here.
        words: Any = OmegaConf.to_container(hydra.overrides.task, resolve=False)
        overrides = (*words, *later_words(self.words))
        if str(hydra.mode).endswith("MULTIRUN"):
            self.sweep_dir = Path(hydra.sweep.dir).absolute()
        try:
            finish(config, hydra.runtime.choices, overrides)
            recipe = recipe_path(hydra.runtime.choices, self.recipe_file)
            if self.sweep_dir is None and recipe is not None and is_first_rank():
                say(f"recipe {nearby(recipe)}")
            origin = configuration.Origin(self.command, overrides, recipe)
            result = train(config, run_dir, origin, self.watch)
        except KeyboardInterrupt as interrupted:
            self._say_how_to_go_on(getattr(interrupted, "run_dir", None), run_dir)
            raise
        except Exception as error:
            self.errors.append(error)
            own_dir = getattr(error, "run_dir", None)
            if own_dir is not None:
                _remove_if_empty(run_dir)
                run_dir = own_dir
            if self.sweep_dir is not None:
                say(f"job {run_dir.name} failed: {error}")
                # Left to the sweep's table; where the disk does not take it, it is printed at least.
                with suppress(WriteError):
                    note_failure(run_dir, overrides, str(error))
            elif not _remove_if_empty(run_dir):
                say(f"run folder {nearby(run_dir)}")
            return float("nan")
        if not is_first_rank():
            # Hydra has made a folder for each rank, where they began in different seconds.
            with suppress(OSError):
                run_dir.rmdir()
        elif self.sweep_dir is None:
            show_result(config, result)
        return result.objective

    def _say_how_to_go_on(self, run_dir: Path | None, made_by_hydra: Path) -> None:
        _remove_if_empty(made_by_hydra)
        if run_dir is None:
            return
        words = [word for word in shlex.split(self.command) if not word.startswith("resume=")]
        if self.sweep_dir is None and not {"-m", "--multirun"}.isdisjoint(words):
            # A job in a process of its own: its sweep says it.
            return
        where = "auto" if self.sweep_dir is not None else nearby(run_dir)
        say(f"go on with: {shlex.join([*words, f'resume={where}'])}")


def recipe_path(choices: Any, given: Path | None) -> Path | None:
    """Return the file of a job's recipe; None where it has none.

    Args:
        choices: what Hydra has chosen, by group.
        given: the recipe's file, where the command line named one.
    """
    recipe = choices.get("recipe")
    if not isinstance(recipe, str) or (given is not None and given.stem == recipe):
        return given if isinstance(recipe, str) else None
    return configuration.find_recipe(recipe)


def train(config: Any, run_dir: Path, origin: configuration.Origin, watch: "Watch | None" = None) -> "RunResult":
    """Check a config, run it and write its report, also that of a run that failed half-way."""
    # The check looks at targets of torch's.
    import_torch(with_wandb=logs_to_wandb(config))
    warn(*configuration.check(config, targets=True))
    import_large("mlotool.runner")
    if config.runner.report and is_first_rank():
        # It is needed at the end, when there are more objects to look through.
        import_large("mlotool.report")
    from mlotool import runner

    try:
        result = runner.run(config, output_dir=run_dir, origin=origin, watch=watch)
    except WriteError:
        # The disk that does not take the run's files would not take its page.
        raise
    except RunError as error:
        write_report(config, error.run_dir or run_dir)
        raise
    # Not run_dir: a run goes on in its own folder, or another run of the same second had it.
    if result.output_dir != run_dir:
        _remove_if_empty(run_dir)
    if not result.had_finished:
        write_report(config, result.output_dir)
    return result


def logs_to_wandb(config: Any) -> bool:
    """Say whether a run of a config, which need not have been checked, logs to W&B from the process that begins it."""

    def value(key: str) -> Any:
        return OmegaConf.select(config, key, throw_on_resolution_failure=False)

    if not OmegaConf.is_dict(value("logger")) or value("runner.devices") not in (1, "auto"):
        # Ranks log, which this process starts, or which torchrun has started.
        return False
    return wandb_mode(value("logger.mode"), value("logger.wandb")) is not None


def write_report(config: Any, run_dir: Path) -> None:
    """Write the report where the recipe wants one; a failure is a warning, for the run itself is done."""
    if not config.runner.report or not is_first_rank():
        return
    from mlotool.report import write_report as write

    try:
        write(run_dir)
    except KeyboardInterrupt:
        say(f"the run has ended, but its report was not written. Write it with: mlotool report {nearby(run_dir)}")
        raise
    except Exception as error:
        reason = str(error) if isinstance(error, MlotoolError) else f"{type(error).__name__}: {error}"
        warn(f"the report could not be written ({reason}); try again: mlotool report {nearby(run_dir)} --debug")


def _remove_if_empty(run_dir: Path) -> bool:
    """Remove the folder that Hydra has made for a run, and the one around it, `outputs/<name>`, if they are empty."""
    # Another run of this second may have been given the same folder, and have taken it away.
    with suppress(OSError):
        if any(run_dir.iterdir()):
            return False
        run_dir.rmdir()
        around, here = run_dir.parent, Path.cwd()
        if is_stamp(run_dir.name) and around != here and around not in here.parents:
            around.rmdir()
    return True


def is_first_rank() -> bool:
    """Say whether this process is alone, or rank 0 of those that torchrun or SLURM has started."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"


MAX_METRICS = 40


def show_result(config: Any, result: "RunResult") -> None:
    """Print objective and final metrics of the evaluated splits, each with its tick, and where everything lies."""
    rows: dict[str, str] = {}
    if config.objective is not None and result.objective is not None:
        tick = result.ticks.get(config.objective) if result.best_tick is None else result.best_tick
        rows[f"objective {config.objective}"] = _taken(result, result.objective, tick)
    splits = () if config.evaluate is None else config.evaluate.splits
    metrics = [(key, value) for key, value in sorted(result.metrics.items()) if key.split("/")[0] in splits]
    rows |= {key: _taken(result, value, result.ticks.get(key)) for key, value in metrics[:MAX_METRICS]}
    report = result.output_dir / RunFolder.PAGE
    written = report if report.is_file() else None
    if config.baseline == "fixed":
        rows["control"] = "baseline=fixed: the upper problems took no steps; their outputs were held at neutral values"
    for name, path in (("run folder", result.output_dir), ("checkpoint", result.checkpoint), ("report", written)):
        if path is not None:
            rows[name] = nearby(path)
    width = max(map(len, rows))
    findings = RunFolder(result.output_dir).summary().get("findings", ())
    lines = [f"{name:<{width}}  {text}" for name, text in rows.items()]
    print_lines(plain_console(), ["\n", *lines, *(f"found: {text}" for text in findings)])


def _taken(result: "RunResult", value: float, tick: int | None) -> str:
    """Return a value with the tick at which it was taken, where that is known."""
    if tick is None:
        return f"{value:.4g}"
    last = max(result.ticks.values(), default=0)
    which = " (best checkpoint)" if tick == result.best_tick else " (last)" if tick == last else ""
    return f"{value:<9.4g} at tick {tick}{which}"
