"""Finished runs: their modules, and their metrics on any split."""

from pathlib import Path
from typing import Any

from torch import nn

from mlotool.config import build, load_run_config
from mlotool.core.errors import ConfigError
from mlotool.core.suggest import did_you_mean
from mlotool.runner.checkpoint import load_program
from mlotool.runner.evaluation import Evaluator
from mlotool.runner.folder import RunFolder


def load(run_dir: Path | str, problem: str, checkpoint: str = "best") -> nn.Module:
    """Return the module of a problem as a run left it, on the CPU and in eval mode.

    Args:
        run_dir: the run folder.
        problem: the problem's name.
        checkpoint: "best" or "last".

    Raises:
        ConfigError: there is no such problem or checkpoint.

    Example::

        classifier = mlotool.load("outputs/mwn/2026-01-31_12-00-00", "classifier")
    """
    built, _ = _rebuild(run_dir, checkpoint)
    problems = built.program.problems
    if problem not in problems:
        raise ConfigError(
            f"Unknown problem '{problem}' in {run_dir}; expected one of {', '.join(problems)}."
            f"{did_you_mean(problem, problems)} Correct the name."
        )
    return problems[problem].module.eval()


def evaluate(run_dir: Path | str, split: str, checkpoint: str = "best") -> dict[str, float]:
    """Return `<split>/<metric>` for the metrics of the recipe's `evaluate`.

    Args:
        run_dir: the run folder.
        split: a split of the recipe's data, evaluated in the run or not.
        checkpoint: "best" or "last".

    Raises:
        ConfigError: there is no such split or checkpoint, or the recipe evaluates nothing.
    """
    built, config = _rebuild(run_dir, checkpoint)
    evaluator = make_evaluator(config, built.program.problems, built.data)
    if evaluator is None:
        raise ConfigError(
            f"{run_dir}: the recipe's evaluate is null; expected a problem and metrics. "
            "Write evaluate: {problem: <name>, metrics: [accuracy], splits: {}} in its config.yaml."
        )
    return evaluator.evaluate(split)


def make_evaluator(config: Any, problems: Any, data: Any, device: Any = "cpu") -> Evaluator | None:
    """Return the evaluator of a config, or None where it evaluates nothing."""
    settings = config.evaluate
    if settings is None:
        return None
    if settings.problem not in problems:
        raise ConfigError(
            f"evaluate.problem: found '{settings.problem}'; expected one of {', '.join(problems)}."
            f"{did_you_mean(settings.problem, problems)} Correct evaluate.problem."
        )
    problem = problems[settings.problem]
    return Evaluator(problem.module, data, list(settings.metrics), settings.batch_size, device, problem.reading)


def _rebuild(run_dir: Path | str, checkpoint: str) -> tuple[Any, Any]:
    # The checkpoint first: without one there is no need to build anything.
    path = RunFolder(Path(run_dir)).find_checkpoint(checkpoint)
    config = load_run_config(Path(run_dir))
    built = build(config)
    load_program(built.program, path)
    return built, config
