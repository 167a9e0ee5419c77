"""`mlotool run`: every job that a command line describes, through Hydra."""

import argparse
import shlex
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path

from mlotool.cli.arguments import Request, VerbParser, read_request, recipe_parser, require_recipe
from mlotool.cli.terminal import say, warn
from mlotool.config.recipes import is_literal, quoted
from mlotool.core.errors import ConfigError
from mlotool.core.messages import did_you_mean

DESCRIPTION = """Train what a recipe describes. All of Hydra's command line works:

  mlotool run +recipe=mwn                       a built-in recipe; `mlotool run mwn` is the same
  mlotool run path/to/mine.yaml                 a recipe of yours; ./recipes/NAME.yaml is found by its name
  mlotool run mwn seed=1 data=mnist             values, and options of the config groups
  mlotool run -m mwn seed=0,1,2                 a sweep: a folder a job, a table at the end, sweep.csv
  mlotool run -m mwn 'seed=range(0,32)' sweep.fuse=32   32 jobs in one process, as one program where they can
  mlotool run -m mwn seed=0,1,2 sweep.workers=2 two jobs at a time, each in a process of its own
  mlotool run -m mwn sweep=optuna sweep.num_trials=20 'problems.classifier.optimizer.lr=tag(log, interval(1e-3, 1e-1))'
  mlotool run -m mwn seed=0,1,2 sweep.workers=2 resume=auto    go on with a sweep that was killed
  mlotool run mwn --cfg job                     the config, not run
  mlotool run mwn resume=auto                   go on with the newest unfinished run of this config; also resume=FOLDER
  mlotool run mwn --trust mypackage             a recipe that uses classes of your own package

A run lies in outputs/<name>/<date>_<time>, a sweep in outputs/<name>/multirun/<date>_<time>/<job>.
"""
INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")


def main(words: Sequence[str]) -> int:
    """Run; 0 when every job finished."""
    arguments = _parser().parse(words)
    from mlotool.cli.hydra_app import call_hydra, never, open_sources

    request = read_request(arguments.words)
    hydra_flags = _hydra_flags(arguments)
    shows_only = bool(arguments.cfg or arguments.info or arguments.hydra_help)
    if not shows_only:
        require_recipe(request, "run")
    if arguments.config_dir is not None:
        request = replace(request, overrides=(*request.overrides, _search_path(arguments.config_dir)))
    open_sources(request, arguments.trust)
    if arguments.cfg:
        _check_config(request, arguments)
    if shows_only:
        if arguments.cfg != "job":
            call_hydra(request.hydra_words(), never, hydra_flags)
        return 0
    _check_settings(request.overrides, is_sweep=arguments.multirun)
    if arguments.multirun:
        return _run_many(request, words, arguments.trust, hydra_flags)
    _run_jobs(request, words, arguments.trust, hydra_flags)
    return 0


def _run_many(request: Request, words: Sequence[str], trusted: Sequence[str], flags: Sequence[str]) -> int:
    """Run the jobs of a sweep, in this process where nothing asks for others."""
    from mlotool.cli.job import is_first_rank
    from mlotool.cli.sweep import run_sweep, sweep_folder
    from mlotool.config.sweep_plan import read_sweep
    from mlotool.sweep.points import write_plan

    # `resume=..` means the sweep, not its jobs.
    resumes = [word for word in request.overrides if word.startswith("resume=")]
    resume = resumes[-1].partition("=")[2].strip("'\"") if resumes else "null"
    request = replace(request, overrides=tuple(word for word in request.overrides if word not in resumes))
    # Several recipes in one sweep have no common `name`, of which the default folder is made.
    if len(request.recipe_names()) != 1 and not any(word.startswith("hydra.sweep.dir=") for word in request.overrides):
        default = "hydra.sweep.dir=outputs/recipes/multirun/${now:%Y-%m-%d_%H-%M-%S}"
        request = replace(request, overrides=(*request.overrides, default))
    plan = read_sweep(request.hydra_words())
    idle = [key for key in _OF_OPTUNA if any(word.startswith(f"sweep.{key}=") for word in request.overrides)]
    if plan.settings["method"] == "grid" and idle:
        warn(
            f"sweep.{idle[0]}: found it in a grid, which runs every combination and ignores it; expected it with "
            "sweep=optuna. Add sweep=optuna, or leave it out."
        )
    if plan.needs_processes:
        return run_sweep(plan, request, words, trusted, None if resume == "null" else resume)
    # What a recipe sweeps is swept as if it were typed.
    request = replace(request, overrides=(*request.overrides, *plan.listed))
    if not is_first_rank():
        _run_jobs(request, words, trusted, flags)
        return 0
    folder, is_resumed = sweep_folder(plan, None if resume == "null" else resume)
    if not is_literal(str(folder)):
        raise ConfigError(f"found the folder '{folder}'; expected one without '$' and backslashes. Rename it.")
    own = (f"hydra.sweep.dir={quoted(str(folder))}", *(["resume=auto"] if is_resumed else []))
    request = replace(request, overrides=(*request.overrides, *own))
    write_plan(folder, plan)
    _run_jobs(request, words, trusted, flags, folder)
    return 0


def _run_jobs(
    request: Request, words: Sequence[str], trusted: Sequence[str], flags: Sequence[str], folder: Path | None = None
) -> None:
    """Let Hydra run the jobs in this process, and show what became of a sweep; raise the first error."""
    from mlotool.cli.hydra_app import call_hydra
    from mlotool.cli.job import Job, is_first_rank
    from mlotool.cli.report import show_sweep
    from mlotool.sweep.folder import locked

    job = Job(shlex.join(["mlotool", "run", *words]), request.hydra_words(), request.file, tuple(trusted))
    try:
        with locked(folder) if folder is not None else nullcontext():
            call_hydra(request.hydra_words(), job, flags)
    finally:
        if job.sweep_dir is not None and is_first_rank():
            with suppress(ConfigError):  # no job had begun
                show_sweep(job.sweep_dir)
    if job.errors and job.sweep_dir is not None:
        from mlotool.cli.sweep import exit_code

        exit_code(job.sweep_dir)
    if job.errors:
        # A job that was refused its folder leaves nothing of it there.
        raise job.errors[0]
    if "--multirun" in flags and job.sweep_dir is None:
        # A launcher ran the jobs in processes of its own.
        say("`mlotool report <the sweep's folder>` makes the table of its jobs.")


def _parser() -> VerbParser:
    parser = recipe_parser("run", DESCRIPTION)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("-m", "--multirun", action="store_true", help="a sweep: key=a,b runs a job for each")
    mode.add_argument("-c", "--cfg", choices=("job", "hydra", "all"), help="print the config instead of running")
    mode.add_argument("-i", "--info", nargs="?", const="all", choices=INFO, help="print what Hydra found where")
    mode.add_argument("--hydra-help", action="store_true", help="Hydra's own help")
    parser.add_argument("-p", "--package", help="with --cfg: the part to print")
    parser.add_argument("--resolve", action="store_true", help="with --cfg: resolve interpolations")
    parser.add_argument("-cd", "--config-dir", metavar="DIR", help="a folder of yours with config groups")
    return parser


def _hydra_flags(arguments: argparse.Namespace) -> list[str]:
    if (arguments.resolve or arguments.package) and not arguments.cfg:
        raise ConfigError("Found --resolve or --package without --cfg; they choose what --cfg prints. Add --cfg job.")
    flags = [f"--{name.replace('_', '-')}" for name in ("multirun", "resolve", "hydra_help") if vars(arguments)[name]]
    for name in ("cfg", "info", "package"):
        if vars(arguments)[name] is not None:
            flags += [f"--{name.replace('_', '-')}", vars(arguments)[name]]
    return flags


def _search_path(folder: str) -> str:
    """Return the override that says what --config-dir does."""
    path = Path(folder).absolute()
    if not path.is_dir():
        raise ConfigError(f"--config-dir: found '{folder}', which is not there; expected a folder. Correct the path.")
    return f"hydra.searchpath=[{quoted(str(path))}]"


def _check_config(request: Request, arguments: argparse.Namespace) -> None:
    """Compose the config that --cfg asks for, and print that of a job: Hydra would print it before we look at it."""
    from omegaconf import OmegaConf

    from mlotool import config
    from mlotool.config.resolve import limit_expansion

    composed, package = config.compose(None, request.hydra_words()), arguments.package
    if arguments.resolve:
        limit_expansion(composed)
    if arguments.cfg != "job":
        return
    with config.config_errors():
        found = composed if package is None else OmegaConf.select(composed, package)
        if found is None:
            raise ConfigError(
                f"--package: found '{package}', which the config does not have; expected one of {', '.join(composed)}, "
                f"or a key below.{did_you_mean(package, composed)} Correct it."
            )
        text = OmegaConf.to_yaml(found, resolve=arguments.resolve) if OmegaConf.is_config(found) else f"{found}\n"
    print(f"# @package {package}\n{text}" if package else text)


_OF_OPTUNA = ("num_trials", "second_objective", "seed", "sampler", "sampler_options", "pruner", "pruner_options",
              "storage")  # fmt: skip


def _check_settings(words: Sequence[str], *, is_sweep: bool) -> None:
    """Refuse `hydra.job.chdir=true`, by which paths would count from another folder; warn of idle settings."""
    if any(word.lstrip("+").lower().startswith("hydra.job.chdir=t") for word in words):
        raise ConfigError("hydra.job.chdir: found true; expected false, as paths count from the working folder.")
    if not is_sweep and any(word.startswith(("sweep=", "sweep.")) for word in words):
        warn("found sweep settings, which act in a sweep only; add -m, or leave them out.")
