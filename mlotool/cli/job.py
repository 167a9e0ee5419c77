"""One job of `mlotool run`: check, train, report. Hydra calls it, once or for every job of a sweep."""

import json
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlotool import config as configuration
from mlotool.cli.first_rank import is_first_rank
from mlotool.cli.show_result import nearby, show_result
from mlotool.core.errors import RunError

if TYPE_CHECKING:
    from mlotool.runner import RunResult


@dataclass
class Job:
    """What Hydra calls with each composed config.

    Errors are kept in `errors`, not raised: Hydra would announce them in its own words, and stop a sweep's summary.

    Args:
        command: the command line, for provenance.json.
        recipe_file: of a recipe that was given by its path.
        trusted: packages of the user's that recipes may use.

    Attributes:
        errors: those of all jobs, in order.
        sweep_dir: the folder of the sweep; None in a single run.
    """

    command: str
    recipe_file: Path | None = None
    trusted: tuple[str, ...] = ()
    errors: list[Exception] = field(default_factory=list)
    sweep_dir: Path | None = None

    def __call__(self, config: Any) -> float | None:
        """Run one job; return its objective, or NaN where it failed."""
        from hydra.core.hydra_config import HydraConfig
        from hydra.types import RunMode

        # A launcher may have carried this object into another process.
        for package in self.trusted:
            configuration.trust(package)
        hydra = HydraConfig.get()
        run_dir = Path(hydra.runtime.output_dir)
        overrides = tuple(hydra.overrides.task)
        if hydra.mode == RunMode.MULTIRUN:
            self.sweep_dir = Path(hydra.sweep.dir).absolute()
        try:
            recipe = self._recipe_path(hydra.runtime.choices)
            if self.sweep_dir is None and recipe is not None and is_first_rank():
                print(f"mlotool: recipe {nearby(recipe)}", file=sys.stderr)
            sweep = None if self.sweep_dir is None else self.sweep_dir.name
            origin = configuration.Origin(self.command, overrides, recipe, sweep)
            result = train(config, run_dir, origin)
        except KeyboardInterrupt:
            _leave(run_dir)
            raise
        except Exception as error:
            self.errors.append(error)
            run_dir = getattr(error, "run_dir", None) or run_dir
            if self.sweep_dir is None:
                _leave(run_dir)
            else:
                _note_failure(run_dir, overrides, error)
                print(f"mlotool: job {run_dir.name} failed: {error}", file=sys.stderr)
            return float("nan")
        if not is_first_rank():
            # Hydra has made a folder for each rank, where they began in different seconds.
            with suppress(OSError):
                run_dir.rmdir()
        elif self.sweep_dir is None:
            show_result(config, result)
        return result.objective

    def _recipe_path(self, choices: Any) -> Path | None:
        recipe = choices.get("recipe")
        if not isinstance(recipe, str):
            return None
        if self.recipe_file is not None and self.recipe_file.stem == recipe:
            return self.recipe_file
        return configuration.find_recipe(recipe)


def train(config: Any, run_dir: Path, origin: configuration.Origin) -> "RunResult":
    """Check a config, run it and write its report, also that of a run that failed half-way."""
    for warning in configuration.check(config, targets=True):
        print(f"mlotool: warning: {warning}", file=sys.stderr)
    from mlotool import runner

    try:
        result = runner.run(config, output_dir=run_dir, origin=origin)
    except RunError as error:
        write_report(config, error.run_dir or run_dir)
        raise
    # Not run_dir: where another run of the same second had it, the runner took the folder beside it.
    write_report(config, result.output_dir)
    return result


def write_report(config: Any, run_dir: Path) -> None:
    """Write the report where the recipe wants one; a failure is a warning, for the run itself is done."""
    if not config.runner.report or not is_first_rank():
        return
    from mlotool.report import write_report as write

    try:
        write(run_dir)
    except Exception as error:
        text = f"the report could not be written ({type(error).__name__}: {error})"
        print(f"mlotool: warning: {text}; try again: mlotool report {run_dir} --debug", file=sys.stderr)


def _leave(run_dir: Path) -> None:
    """Say what there is of a run that did not finish; Hydra makes the folder of one that never began as well."""
    # Another run of this second may have been given the same folder, and have taken it away.
    with suppress(OSError):
        if any(run_dir.iterdir()):
            print(f"mlotool: run folder {nearby(run_dir)}", file=sys.stderr)
        else:
            run_dir.rmdir()


def _note_failure(run_dir: Path, overrides: tuple[str, ...], error: Exception) -> None:
    # The table of a sweep is read from the folders; a job that was refused has none of the runner's files.
    summary, listing = run_dir / "summary.json", run_dir / "overrides.txt"
    if not summary.exists():
        content: dict[str, Any] = {
            "status": "failed",
            "objective": None,
            "metrics": {},
            "best": None,
            "error": str(error),
        }
        summary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if not listing.exists():
        listing.write_text("".join(f"{line}\n" for line in overrides), encoding="utf-8")
