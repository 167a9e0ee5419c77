"""Finished runs: their modules, and their metrics on any split."""

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mlotool.config import Built, build, load_run_config, trust_all
from mlotool.config.objective import is_wrong_way_round, known_direction
from mlotool.core.arguments import require, require_path, require_texts
from mlotool.core.bound_module import BoundModule
from mlotool.core.errors import ConfigError
from mlotool.core.messages import did_you_mean
from mlotool.core.user_code import user_code
from mlotool.problem.problem import Problem
from mlotool.runner.checkpoint import load_program
from mlotool.runner.evaluation import Evaluator, make_recalibration
from mlotool.runner.folder import RunFolder
from mlotool.spaces.shared.shared_space import PATH, SharedSpace


def load(
    run_dir: Path | str,
    problem: str,
    checkpoint: str = "best",
    *,
    trust: Sequence[str] = (),
    overrides: Sequence[str] = (),
) -> nn.Module:
    """Return the module of a problem as a run left it, on the CPU and in eval mode.

    Args:
        run_dir: the run folder.
        problem: the problem's name.
        checkpoint: "best" or "last".
        trust: packages of yours whose code the run uses.
        overrides: `key=value`, for what a stranger's run folder may not say: `data.root=/data`.

    Raises:
        ConfigError: there is no such problem or checkpoint, the run uses code that is not trusted, or the folder's
            config.yaml says what only the user may.
        CheckpointError: the checkpoint cannot be read, or does not fit config.yaml.

    Example::

        classifier = mlotool.load("outputs/mwn/2026-01-31_12-00-00", "classifier")
    """
    require(isinstance(problem, str), "load.problem", problem, "one problem's name", "Load one after the other.")
    built, _ = _rebuild("load", run_dir, checkpoint, trust, overrides)
    problems = built.program.problems
    if problem not in problems:
        raise ConfigError(
            f"Unknown problem '{problem}' in {run_dir}; expected one of {', '.join(problems)}."
            f"{did_you_mean(problem, problems)} Correct the name."
        )
    return problems[problem].module.eval()


def evaluate(
    run_dir: Path | str,
    split: str,
    checkpoint: str = "best",
    *,
    trust: Sequence[str] = (),
    overrides: Sequence[str] = (),
) -> dict[str, float]:
    """Return `<split>/<metric>` for the metrics of the recipe's `evaluate`.

    Args:
        run_dir: the run folder.
        split: a split of the recipe's data, evaluated in the run or not.
        checkpoint: "best" or "last".
        trust: packages of yours whose code the run uses.
        overrides: `key=value`, for what a stranger's run folder may not say: `data.root=/data`.

    Raises:
        ConfigError: there is no such split or checkpoint, the recipe evaluates nothing, or the folder's config.yaml
            says what only the user may.
        CheckpointError: the checkpoint cannot be read, or does not fit config.yaml.
    """
    require(isinstance(split, str), "evaluate.split", split, "one split's name", "Evaluate one after the other.")
    built, config = _rebuild("evaluate", run_dir, checkpoint, trust, overrides)
    evaluator = make_evaluator(config, built)
    if evaluator is None:
        raise ConfigError(
            f"{run_dir}: the recipe's evaluate is null; expected a problem and metrics. "
            "Write evaluate: {problem: <name>, metrics: [accuracy], splits: {}} in its config.yaml."
        )
    with user_code():
        return evaluator.evaluate(split)


def make_evaluator(config: Any, built: Built, device: Any = "cpu") -> Evaluator | None:
    """Return the evaluator of a config, or None where it evaluates nothing."""
    settings, problems = config.evaluate, built.program.problems
    if settings is None:
        return None
    problem = problems[settings.problem]
    names = [metric for metric in settings.metrics if isinstance(metric, str)]
    arguments = settings.get("arguments") or {}
    recalibration = make_recalibration(config, built, device)
    if isinstance(problem.module, SharedSpace) and problem.module.has_paths and PATH not in arguments:
        warnings.warn(
            f"evaluate: found no path for the shared space of '{problem.name}', so that each batch has the one that is "
            "drawn for it, and metrics depend on the draw; expected a path where metrics are compared. Train single "
            "models (decisions=.., inherit=<this run's folder>) and compare those, name what gives the path in "
            "evaluate.arguments, or set evaluate=null.",
            stacklevel=2,
        )
    reading = partial(_reading_given, problem, arguments, problems) if arguments else problem.reading
    return Evaluator(
        problem.module,
        built.data,
        names,
        settings.batch_size,
        device,
        reading,
        functions=built.metrics,
        recalibration=recalibration,
    )


@torch.no_grad()
def _reading_given(
    problem: Problem, sources: Mapping[str, str], problems: Mapping[str, Problem], training: bool | None
) -> BoundModule:
    """Return the evaluated module with what other problems give it, as they are now."""
    arguments = {}
    for argument, source in sources.items():
        name, _, method = source.partition(".")
        reading, module = problems[name].reading(training), problems[name].module
        if method and (hasattr(nn.Module, method) or not callable(getattr(module, method, None))):
            raise ConfigError(
                f"evaluate.arguments.{argument}: found '{source}', while {type(module).__name__} has no method "
                f"'{method}' of its own; expected what returns the argument. Correct it, or give what the module "
                f"returns itself: {name}."
            )
        arguments[argument] = reading.method(method) if method else reading()
    return problem.reading(training).given(**arguments)


def _rebuild(
    caller: str, run_dir: Path | str, checkpoint: str, trust: Sequence[str], overrides: Sequence[str]
) -> tuple[Built, Any]:
    require_path(f"{caller}.run_dir", run_dir)
    require(isinstance(checkpoint, str), f"{caller}.checkpoint", checkpoint, "'best' or 'last'")
    require_texts(f"{caller}.trust", trust, "mymodels")
    require_texts(f"{caller}.overrides", overrides, "data.root=/data")
    trust_all(trust)
    # The checkpoint first: without one there is no need to build anything.
    path = RunFolder(Path(run_dir)).find_checkpoint(checkpoint)
    config = load_run_config(Path(run_dir), overrides)
    if is_wrong_way_round(config) and checkpoint == "best":
        warnings.warn(
            f"{run_dir}: found objective_mode={config.objective_mode} with objective={config.objective}, of which the "
            f"other direction is better; expected {known_direction(config)}. Its best.ckpt is that of the WORST "
            "evaluation: use checkpoint=last (--checkpoint last), or run the recipe again.",
            stacklevel=3,
        )
    # It has chosen the checkpoint, and nothing more: the metrics may be others than in the run.
    config.objective = config.objective_mode = None
    built = build(config)
    load_program(built.program, path)
    return built, config
