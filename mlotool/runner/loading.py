"""Finished runs: their modules, their metrics on any split, and their weights for other runs."""

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import nn

from mlotool.config import Built, build, build_module, load_run_config, trust_all
from mlotool.config.run_config import finished_run
from mlotool.core.arguments import require, require_path, require_texts
from mlotool.core.errors import ConfigError
from mlotool.core.messages import did_you_mean, is_command_line
from mlotool.core.user_code import user_code
from mlotool.folders import hub
from mlotool.folders.run_folder import RunFolder
from mlotool.program import Program
from mlotool.runner.checkpoint import fitting, newest_first, read_checkpoint
from mlotool.runner.evaluation import make_evaluator
from mlotool.spaces import SharedSpace, Space

# How a run trains. Not a seed, which data of the user's may read, nor a stream, which `evaluate.recalibrate` reads.
_OF_TRAINING = re.compile(
    r"(name|objective|objective_mode|(runner|logger|sweep|graph|hypergradient)\..*|debug\.(?!limit_samples).*"
    r"|problems\.\w+\.(optimizer|scheduler|hypergradient|unroll_steps|warmup_steps|gradient_clip_norm)\b.*)="
)


def load(
    run_dir: Path | str,
    problem: str,
    checkpoint: str = "best",
    *,
    into: nn.Module | None = None,
    trust: Sequence[str] = (),
    allow_hub: bool = False,
    overrides: Sequence[str] = (),
) -> nn.Module:
    """Return the trained module of a problem of a run, on the CPU and in eval mode.

    Args:
        run_dir: the run folder.
        problem: the problem's name.
        checkpoint: "best" or "last".
        into: a module to load the parameters and buffers into; it stays on its device and is put into eval mode. None
            builds the module of the recipe. Runs of `mlotool.fit` have no recipe and need `into`.
        trust: names of your own packages whose code the run uses.
        allow_hub: whether models and tokenizers that the run names may be downloaded from the Hugging Face Hub.
        overrides: `key=value` settings that a run folder, which may be anybody's, is not allowed to make itself, such
            as `data.root=/data`.

    Returns:
        The module; if `into` is given, that one.

    Raises:
        ConfigError: there is no such problem or checkpoint, the run uses code that is not trusted, or the folder's
            config.yaml has settings that only the user may make.
        CheckpointError: the checkpoint cannot be read, or does not fit config.yaml.

    Example::

        classifier = mlotool.load("outputs/mwn/2026-01-31_12-00-00", "classifier")
        classifier = mlotool.load(result.output_dir, "classifier", into=Classifier())
    """
    require(isinstance(problem, str), "load.problem", problem, "one problem's name", "Load one after the other.")
    if into is not None:
        require(isinstance(into, nn.Module), "load.into", into, "an nn.Module, built", "Give one of the same form.")
        return _loaded_into(into, Path(run_dir), problem, checkpoint)
    if allow_hub:
        hub.allow_hub()
    built, _ = _rebuild("load", run_dir, checkpoint, trust, overrides)
    problems = built.program.problems
    if problem not in problems:
        raise _unknown_problem(problem, run_dir, problems)
    return problems[problem].module.eval()


def _unknown_problem(problem: str, run_dir: Path | str, known: Iterable[str]) -> ConfigError:
    names = list(known)
    return ConfigError(
        f"Unknown problem '{problem}' in {run_dir}; expected one of {', '.join(names)}."
        f"{did_you_mean(problem, names)} Correct the name."
    )


def _loaded_into(module: nn.Module, run_dir: Path, problem: str, checkpoint: str) -> nn.Module:
    """Put what a run has learned into a module of the caller's: nothing is built, and no code of the run is called."""
    require_path("load.run_dir", run_dir)
    require(isinstance(checkpoint, str), "load.checkpoint", checkpoint, "'best' or 'last'")
    path = _find_checkpoint(RunFolder(run_dir), checkpoint)
    saved = read_checkpoint(path)["program"]
    if problem not in saved:
        raise _unknown_problem(problem, run_dir, saved)
    try:
        module.load_state_dict(saved[problem]["module"])
    except RuntimeError as error:
        raise ConfigError(
            f"load.into: found {type(module).__name__}, which does not fit '{problem}' in {path} "
            f"({' '.join(str(error).split())[:500]}). Build it as in the run."
        ) from error
    return module.eval()


def evaluate(
    run_dir: Path | str,
    split: str,
    checkpoint: str = "best",
    *,
    trust: Sequence[str] = (),
    allow_hub: bool = False,
    overrides: Sequence[str] = (),
) -> dict[str, float]:
    """Evaluate a run on a split; return the metrics of the recipe's `evaluate` by `<split>/<metric>`.

    Args:
        run_dir: the run folder.
        split: a split of the recipe's data, also one that the run did not evaluate.
        checkpoint: "best" or "last".
        trust: names of your own packages whose code the run uses.
        allow_hub: whether models and tokenizers that the run names may be downloaded from the Hugging Face Hub.
        overrides: `key=value` settings that a run folder, which may be anybody's, is not allowed to make itself, such
            as `data.root=/data`.

    Raises:
        ConfigError: there is no such split or checkpoint, the recipe evaluates nothing, or the folder's config.yaml
            has settings that only the user may make.
        CheckpointError: the checkpoint cannot be read, or does not fit config.yaml.
    """
    require(isinstance(split, str), "evaluate.split", split, "one split's name", "Evaluate one after the other.")
    if allow_hub:
        hub.allow_hub()
    built, config = _rebuild("evaluate", run_dir, checkpoint, trust, overrides)
    evaluator = make_evaluator(config, built)
    if evaluator is None:
        raise ConfigError(
            f"{run_dir}: its recipe evaluates nothing. Write evaluate: {{problem: .., metrics: ..}} in config.yaml."
        )
    with user_code():
        return evaluator.evaluate(split, key="--split" if is_command_line() else "evaluate.split")


def _rebuild(
    caller: str, run_dir: Path | str, checkpoint: str, trust: Sequence[str], overrides: Sequence[str]
) -> tuple[Built, Any]:
    require_path(f"{caller}.run_dir", run_dir)
    require(isinstance(checkpoint, str), f"{caller}.checkpoint", checkpoint, "'best' or 'last'")
    require_texts(f"{caller}.trust", trust, "mymodels")
    require_texts(f"{caller}.overrides", overrides, "data.root=/data")
    trust_all(trust)
    # The checkpoint first: without one there is no need to build anything.
    path = _find_checkpoint(RunFolder(run_dir), checkpoint)
    config = load_run_config(Path(run_dir), overrides)
    for word in filter(_OF_TRAINING.match, overrides):
        warnings.warn(
            f"found the override {word}, which has no effect on a finished run; expected keys of data, evaluate or "
            "problems.<name>.module. Leave it out.",
            stacklevel=3,
        )
    # It has chosen the checkpoint, and nothing more: the metrics may be others than in the run.
    config.objective = config.objective_mode = None
    # They are for a training, and a stranger's logger may upload.
    config.runner.callbacks, config.logger.loggers = [], []
    built = build(config)
    saved = read_checkpoint(path)["program"]
    with fitting(path, overrides):
        built.program.load_state_dict(saved)
    return built, config


def _find_checkpoint(folder: RunFolder, which: str) -> Path:
    """Return the checkpoint `which`; a run without one is a ConfigError."""
    if not folder.path.is_dir():
        raise ConfigError(f"There is no folder '{folder.path}'; expected a run folder, as `mlotool run` printed it.")
    path = folder.checkpoint(which)
    if not path.is_file():
        if not folder.checkpoints.is_dir() and any(folder.path.glob("*.safetensors")):
            raise ConfigError(
                f"{folder.path} is an export, without checkpoints; expected the folder of a run. Its README.md says "
                "how to load the weights."
            )
        # Refuses a folder that is not a run's.
        load_run_config(folder.path, is_own=True)
        present = ", ".join(file.stem for file in newest_first(folder.checkpoints)) or "none"
        raise ConfigError(
            f"{folder.path} has no checkpoint '{which}', but {present}; expected {path}. Name another one."
        )
    return path


def inherit(program: Program, folder: Path) -> None:
    """Put the modules of a program into the states that the problems of the same names have in another run.

    Where the other module is a shared space and this one a model of that space, it gets that model's part. Problems
    that the other run does not have begin as they are. Optimizers begin anew.

    Args:
        program: as it was built.
        folder: of the other run, which has finished, or a checkpoint in it; of a folder the last one is taken.

    Raises:
        ConfigError: there is no such run, its config.yaml says what only the user may say, no problem has a name of its
            problems, or a module does not fit the state.
        CheckpointError: the checkpoint cannot be read.
    """
    run = RunFolder.of(folder)
    run_dir = run.path
    finished_run("inherit", run_dir)
    path = folder if run_dir != folder else _find_checkpoint(run, "last")
    states, spaces = _left_by(run_dir, path.resolve(), path.stat().st_mtime_ns)
    names = [name for name in program.problems if name in states]
    if not names:
        raise ConfigError(
            f"inherit: found '{folder}', whose problems are {', '.join(states)}; expected at least one of "
            f"{', '.join(program.problems)}. Give the folder of a run of the same recipe, or leave inherit out."
        )
    for name in names:
        module, space, state = program.problems[name].module, spaces.get(name), states[name]
        if space is not None and isinstance(module, Space) and not isinstance(module, SharedSpace):
            state = _of_path(name, module, space, run_dir)
        try:
            module.load_state_dict(state)
        except RuntimeError as error:
            raise ConfigError(
                f"inherit: found '{folder}', where '{name}' does not fit its module here "
                f"({' '.join(str(error).split())[:500]}). Give problems.{name}.module the settings of that run."
            ) from error


# Once for all trials of a process.
@lru_cache(maxsize=1)
def _left_by(folder: Path, path: Path, written_at: int) -> tuple[dict[str, Any], dict[str, SharedSpace]]:
    """Return the states of a run's modules by problem, and those modules that are shared spaces, in these states."""
    config = load_run_config(folder, built=("problems",))
    saved, spaces = read_checkpoint(path)["program"], {}
    with fitting(path):
        states = {name: dict(saved[name]["module"]) for name in config.problems}
        for name, problem in config.problems.items():
            if isinstance(problem.module, Mapping) and problem.module.get("shared"):
                module = build_module(config, name)
                module.load_state_dict(states[name])
                if isinstance(module, SharedSpace):
                    spaces[name] = module
    return states, spaces


def _of_path(name: str, module: Space, space: SharedSpace, folder: Path) -> Mapping[str, Any]:
    """Return the part of a shared space's state that belongs to a model of the space."""
    known = {decision.name: decision.candidates for decision in space.table}
    path = {decision.name: decision.value for decision in module.decisions.values()}
    strange = next((decision for decision, value in path.items() if value not in known.get(decision, ())), None)
    if strange is not None:
        raise ConfigError(
            f"inherit: found the decision {strange}={path[strange]} of the problem '{name}', which the shared space in "
            f"'{folder}' does not have. Give problems.{name}.module the mutators of that run."
        )
    return space.state_of(path)
