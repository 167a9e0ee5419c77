"""`mlotool run`: every job that a command line describes, through Hydra."""

import argparse
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mlotool.cli.arguments import Request, VerbParser, read_request, recipe_parser
from mlotool.cli.terminal import nearby, say, warn
from mlotool.config.recipes import quoted
from mlotool.core.errors import ConfigError
from mlotool.core.messages import did_you_mean

if TYPE_CHECKING:
    from mlotool.cli.job import Job
    from mlotool.config.sweep_plan import SweepPlan


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
    from mlotool.cli.arguments import require_recipe
    from mlotool.cli.hydra_app import call_hydra, never, open_sources
    from mlotool.cli.job import Job

    request = read_request(arguments.words)
    hydra_flags = _hydra_flags(arguments)
    _warn_of_repeated(request.overrides)
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
    plan = None
    check_settings(request.overrides, is_sweep=arguments.multirun)
    if arguments.multirun:
        from mlotool.cli.sweep import run_sweep
        from mlotool.config.sweep_plan import read_sweep

        # `resume=..` means the sweep, not its jobs.
        resumes = [word for word in request.overrides if word.startswith("resume=")]
        plain = replace(request, overrides=tuple(word for word in request.overrides if word not in resumes))
        resume = resumes[-1].partition("=")[2].strip("'\"") if resumes else None
        plan = read_sweep([*plain.hydra_words(), *_sweep_folder(plain, is_sweep=False)])
        check_sweep(plan, request.overrides, is_resumed=resume not in (None, "null"))
        if plan.needs_processes:
            return run_sweep(plan, plain, words, arguments.trust, resume)
        # What a recipe sweeps is swept as if it were typed, also where the sweep goes on later.
        request = replace(request, overrides=(*request.overrides, *plan.listed))
    command = shlex.join(["mlotool", "run", *words])
    job_words = [*request.hydra_words(), *_sweep_folder(request, is_sweep=arguments.multirun)]
    job = Job(command, job_words, request.file, tuple(arguments.trust), plan=plan)
    try:
        call_hydra(job_words, job, hydra_flags)
    except KeyboardInterrupt:
        with suppress(ConfigError):  # no job had begun
            _show_sweep(job)
        raise
    _show_sweep(job)
    if job.errors and job.sweep_dir is not None:
        from mlotool.cli.sweep import exit_code

        exit_code(job.sweep_dir)
    if job.errors:
        # A job that was refused its folder leaves nothing of it there.
        raise job.errors[0]
    if arguments.multirun and job.sweep_dir is None:
        # A launcher ran the jobs in processes of its own.
        say("`mlotool report <the sweep's folder>` makes the table of its jobs.")
    return 0


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


def _warn_of_repeated(overrides: Sequence[str]) -> None:
    last = {word.partition("=")[0]: word for word in overrides if "=" in word}
    for word in overrides:
        key = word.partition("=")[0]
        if last.get(key, word) != word:
            warn(f"{key}: found {word}, and later {last[key]}; the last one counts. Remove one of them.")


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


def _sweep_folder(request: Request, *, is_sweep: bool) -> list[str]:
    if is_sweep:
        from mlotool.cli.sweep import resumed_sweep

        words = resumed_sweep(request)
        if words:
            return words
    # Several recipes in one sweep have no common `name`, of which the default folder is made.
    if len(request.recipe_names()) == 1 or any(word.startswith("hydra.sweep.dir=") for word in request.overrides):
        return []
    return ["hydra.sweep.dir=outputs/recipes/multirun/${now:%Y-%m-%d_%H-%M-%S}"]


def _show_sweep(job: "Job") -> None:
    from mlotool.cli.job import is_first_rank

    if job.sweep_dir is not None and is_first_rank():
        from mlotool.cli.show_sweep import show_sweep

        show_sweep(job.sweep_dir)


_OF_OPTUNA = ("num_trials", "second_objective", "seed", "sampler", "sampler_options", "pruner", "pruner_options",
              "storage")  # fmt: skip


def check_settings(words: Sequence[str], *, is_sweep: bool) -> None:
    """Refuse `hydra.job.chdir=true`; warn of settings that act in a sweep only, or only without one.

    Raises:
        ConfigError: paths would count from another folder than the one the command is called in.
    """
    values = {key.lstrip("+"): value for key, _, value in (word.partition("=") for word in words)}
    if values.get("hydra.job.chdir", "").lower() in ("true", "yes", "on", "1"):
        raise ConfigError(
            "hydra.job.chdir: found true; expected false, as the paths of recipes and data count from the working "
            "folder. Leave it out."
        )
    if not is_sweep and any(word.startswith(("sweep=", "sweep.")) for word in words):
        warn("found sweep settings, which act in a sweep only; add -m, or leave them out.")
    idle, meant = ("hydra.run.dir", "hydra.sweep.dir") if is_sweep else ("hydra.sweep.dir", "hydra.run.dir")
    if idle in values:
        where = "with -m" if is_sweep else "without -m"
        warn(f"{idle}: found {values[idle]} {where}, where it does nothing; expected {meant}. Write {meant}=..")


def check_sweep(plan: "SweepPlan", words: Sequence[str], *, is_resumed: bool) -> None:
    """Refuse the folder of another sweep; warn of settings of a search where nothing is searched.

    Raises:
        ConfigError: the folder that is named holds a sweep, whose results would be taken for those of this one.
    """
    given = [key for key in _OF_OPTUNA if any(word.startswith(f"sweep.{key}=") for word in words)]
    if plan.settings["method"] == "grid" and given:
        warn(
            f"sweep.{given[0]}: found it in a grid, which runs every combination and ignores it; expected it with "
            "sweep=optuna. Add sweep=optuna, or leave it out."
        )
    is_named = any(word.startswith("hydra.sweep.dir=") for word in words)
    if is_named and not is_resumed and (plan.folder / "multirun.yaml").is_file():
        raise ConfigError(
            f"hydra.sweep.dir: found {nearby(plan.folder)}, which holds a sweep already; expected a new folder. Name "
            f"another one, or go on with that sweep: resume={nearby(plan.folder)}."
        )
