"""Check a recipe without running any of it.

Checked are keys, names, the graph, roles, the arguments of mlotool's own targets, the ranges of numbers, the values of
a sweep, and the options of sampler and pruner if Optuna is installed. The exit code is 2 if something is wrong.
With --targets, third-party targets are imported too; optimizers, schedulers, hypergradients, and small data, modules
and programs are built once as in a run; each loss, metric and analysis is evaluated on a few samples, if the models
have at most 5 million parameters; and the GPU and the data have to be there.

  mlotool validate mwn hypergradient=cg
  mlotool validate recipes/mine.yaml --targets  all that can be checked before a run
"""

from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mlotool import config
from mlotool.cli.arguments import Request, compose_request, open_sources, recipe_parser
from mlotool.cli.terminal import warn
from mlotool.config import composition
from mlotool.config.sources import loaded_recipes
from mlotool.config.sweeps import sweep_plan
from mlotool.core import errors, messages
from mlotool.core.process import import_large, import_torch
from mlotool.sweep import driver, study, study_options


def main(words: list[str]) -> int:
    """Print warnings; raise ConfigError with every fault."""
    parser = recipe_parser("validate", __doc__)
    parser.add_argument("--targets", action="store_true", help="also import third-party targets; takes seconds")
    parser.add_argument(
        "--anywhere", action="store_true", help=("with --targets: do not check this machine's GPU and data")
    )
    arguments = parser.parse(words)
    request, composed = compose_request(arguments.words, "validate", arguments.trust)
    machine = arguments.targets and not arguments.anywhere
    first, warnings = "", list[str]()
    try:
        what = {"targets": arguments.targets, "machine": machine, "parts": arguments.targets}
        warnings = config.check(composed, **what, rehearse=partial(_rehearse, composed))
    except errors.ConfigError as error:
        first = str(error)
    params = OmegaConf.select(composed, "sweep.params", throw_on_resolution_failure=False)
    # Only a recipe that sweeps is composed once more, as a sweep.
    is_swept = bool(params) or any("hydra" in recipe.data for recipe in loaded_recipes())
    faults = sweep_faults(request, arguments.trust, machine=machine) if is_swept else []
    # A reference that leads nowhere is for the check to say.
    with suppress(OmegaConfBaseException):
        faults += study_options.option_faults(composition.plain(composed.sweep))
    more = [fault for fault in dict.fromkeys(faults) if fault not in first.splitlines()]
    if first or more:
        # What is said of the recipe itself is a list already, which says how many more there are.
        raise errors.ConfigError("\n".join(filter(None, (first, messages.fault_list(more)))))
    warn(*warnings)
    print(
        f"{messages.escape(str(request.recipe))} is valid" + (f", with {len(warnings)} warning(s)" if warnings else "")
    )
    return 0


def _rehearse(composed: Any, built: Any) -> None:
    import_torch(with_wandb=False)
    import_large("mlotool.runner")
    from mlotool.runner.checking import rehearse_built

    rehearse_built(composed, built)


def sweep_faults(request: Request, trusted: list[str], *, machine: bool) -> list[str]:
    """Return what `run -m` would say of the values that a recipe, or a command line, sweeps.

    Args:
        request: the recipe and overrides.
        trusted: packages of the user's that recipes may use.
        machine: whether the GPUs that it asks for have to be here.
    """
    try:
        open_sources(request, trusted)
        plan = sweep_plan.read_sweep(request.hydra_words())
        if not plan.dimensions:
            return []
        if machine:
            driver.worker_environments(plan)
        if plan.settings["method"] == "optuna" and find_spec("optuna") is not None:
            study.check_study(plan, has_decisions=False)
    except errors.ConfigError as error:
        return str(error).splitlines()
    return sweep_plan.choice_faults(plan)
