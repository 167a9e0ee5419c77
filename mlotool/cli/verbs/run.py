"""Train a recipe. All of Hydra's command line works:

  mlotool run +recipe=mwn                       a built-in recipe; `mlotool run mwn` is the same
  mlotool run path/to/mine.yaml                 your own recipe; ./recipes/NAME.yaml is found by its name
  mlotool run mwn seed=1 data=mnist             values, and options of the config groups
  mlotool run -m mwn seed=0,1,2                 a sweep: one folder per job, a table, sweep.csv
  mlotool run -m mwn 'seed=range(0,32)' sweep.fuse=32   32 jobs in one process, as one program if possible
  mlotool run -m mwn seed=0,1,2 sweep.workers=2 two jobs at a time, each in its own process
  mlotool run -m mwn sweep=optuna sweep.num_trials=20 'problems.classifier.optimizer.lr=tag(log, interval(1e-3, 1e-1))'
  mlotool run -m mwn seed=0,1,2 sweep.workers=2 resume=auto    resume a sweep that was killed
  mlotool run mwn --cfg job                     the config, not run
  mlotool run mwn resume=auto                   resume the newest unfinished run of this config; also resume=FOLDER
  mlotool run mwn --trust mypackage             a recipe that uses classes of your own package

A run is written to outputs/<name>/<date>_<time>, a sweep to outputs/<name>/multirun/<date>_<time>/<job>.
"""

import argparse
from pathlib import Path

from mlotool import config
from mlotool.cli import arguments
from mlotool.cli.terminal import warn
from mlotool.config.recipes import quoted
from mlotool.core.errors import ConfigError
from mlotool.core.messages import did_you_mean

INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")


def main(words: list[str]) -> int:
    """Run; 0 when every job finished."""
    options = _parser().parse(words)
    request = arguments.read_request(options.words)
    hydra_flags = _hydra_flags(options)
    shows_only = bool(options.cfg or options.info or options.hydra_help)
    if not shows_only:
        arguments.require_recipe(request, "run")
    if options.config_dir is not None:
        request = request._replace(overrides=(*request.overrides, _search_path(options.config_dir)))
    arguments.open_sources(request, options.trust)
    if options.cfg:
        _check_config(request, options)
    if shows_only:
        if options.cfg != "job":
            arguments.call_hydra(request.hydra_words(), arguments.never, hydra_flags)
        return 0
    _check_settings(request.overrides, is_sweep=options.multirun)
    from mlotool.cli.sweep import run_here, run_many

    if options.multirun:
        return run_many(request, words, options.trust, hydra_flags)
    return run_here(request, words, options.trust, hydra_flags)


def _parser() -> arguments.VerbParser:
    parser = arguments.recipe_parser("run", __doc__)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("-m", "--multirun", action="store_true", help="run a sweep: key=a,b runs one job for each value")
    mode.add_argument("-c", "--cfg", choices=("job", "hydra", "all"), help="print the config instead of running")
    mode.add_argument("-i", "--info", nargs="?", const="all", choices=INFO, help="print what Hydra found where")
    mode.add_argument("--hydra-help", action="store_true", help="Hydra's own help")
    parser.add_argument("-p", "--package", help="with --cfg: the part to print")
    parser.add_argument("--resolve", action="store_true", help="with --cfg: resolve interpolations")
    parser.add_argument("-cd", "--config-dir", metavar="DIR", help="a folder of yours with config groups")
    return parser


def _hydra_flags(options: argparse.Namespace) -> list[str]:
    if (options.resolve or options.package) and not options.cfg:
        raise ConfigError("Found --resolve or --package without --cfg; they choose what --cfg prints. Add --cfg job.")
    flags = [f"--{name.replace('_', '-')}" for name in ("multirun", "resolve", "hydra_help") if vars(options)[name]]
    for name in ("cfg", "info", "package"):
        if vars(options)[name] is not None:
            flags += [f"--{name.replace('_', '-')}", vars(options)[name]]
    return flags


def _search_path(folder: str) -> str:
    """Return the override that says what --config-dir does."""
    path = Path(folder).absolute()
    if not path.is_dir():
        raise ConfigError(f"--config-dir: found '{folder}', which is not there; expected a folder. Correct the path.")
    return f"hydra.searchpath=[{quoted(str(path))}]"


def _check_config(request: arguments.Request, options: argparse.Namespace) -> None:
    """Compose the config that --cfg asks for, and print that of a job: Hydra would print it before we look at it."""
    from omegaconf import OmegaConf

    from mlotool.config.resolve import limit_expansion

    composed, package = config.compose(None, request.hydra_words()), options.package
    if options.resolve:
        limit_expansion(composed)
    if options.cfg != "job":
        return
    with config.config_errors():
        node = composed if package is None else OmegaConf.select(composed, package)
        if node is None:
            raise ConfigError(
                f"--package: found '{package}', which the config does not have; expected one of {', '.join(composed)}, "
                f"or a key below.{did_you_mean(package, composed)} Correct it."
            )
        text = OmegaConf.to_yaml(node, resolve=options.resolve) if OmegaConf.is_config(node) else f"{node}\n"
    print(f"# @package {package}\n{text}" if package else text)


def _check_settings(words: tuple[str, ...], *, is_sweep: bool) -> None:
    """Refuse `hydra.job.chdir=true`, by which paths would count from another folder; warn of idle settings."""
    if any(word.lstrip("+").lower().startswith("hydra.job.chdir=t") for word in words):
        raise ConfigError("hydra.job.chdir: found true; expected false, as paths count from the working folder.")
    if not is_sweep and any(word.startswith(("sweep=", "sweep.")) for word in words):
        warn("found sweep settings without a sweep; add -m, or leave them out.")
    idle, used = ("hydra.run.dir", "hydra.sweep.dir") if is_sweep else ("hydra.sweep.dir", "hydra.run.dir")
    if any(word.startswith(f"{idle}=") for word in words):
        warn(f"{idle}: has no effect {'with' if is_sweep else 'without'} -m. Write {used}=..")
    last = {word.partition("=")[0]: word for word in words if "=" in word}
    for word in words:
        if (counts := last.get(word.partition("=")[0], word)) != word:
            warn(f"found {word}, and later {counts}; the later one counts. Remove one of them.")
