"""`mlotool validate`: every fault of a recipe at once, without running any of it."""

from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec

from mlotool.cli.arguments import Request, compose_request, recipe_parser
from mlotool.cli.terminal import warn
from mlotool.core.errors import ConfigError
from mlotool.core.messages import escape, fault_list

DESCRIPTION = """Check a recipe: keys, names, graph, roles, and the arguments of mlotool's own targets, read from
source, the ranges of numbers, and the values that it sweeps. Exit code 2 where something is wrong. With --targets also:
third-party targets, which are imported; optimizers, schedulers and hypergradients, and data, modules and programs that
are small, each of which is built once as a run does; the options of a sweep's sampler; whether the GPU and the data are
here.

  mlotool validate mwn hypergradient=cg
  mlotool validate recipes/mine.yaml --targets  all that can be known before a run
"""


def main(words: Sequence[str]) -> int:
    """Print warnings; raise ConfigError with every fault."""
    parser = recipe_parser("validate", DESCRIPTION)
    parser.add_argument("--targets", action="store_true", help="also import third-party targets; takes seconds")
    parser.add_argument("--anywhere", action="store_true", help="with --targets: this machine's GPU and data aside")
    arguments = parser.parse(words)
    from omegaconf.errors import OmegaConfBaseException

    from mlotool import config
    from mlotool.config.composition import plain
    from mlotool.sweep.study_options import option_faults

    request, composed = compose_request(arguments.words, "validate", arguments.trust)
    machine = arguments.targets and not arguments.anywhere
    first, warnings = "", list[str]()
    try:
        warnings = config.check(composed, targets=arguments.targets, machine=machine, parts=arguments.targets)
    except ConfigError as error:
        first = str(error)
    faults = _sweep_faults(request, arguments.trust, machine=machine)
    # A reference that leads nowhere is for the check to say.
    with suppress(OmegaConfBaseException):
        faults += option_faults(plain(composed.sweep)) if arguments.targets else []
    more = [fault for fault in dict.fromkeys(faults) if fault not in first.splitlines()]
    if first or more:
        # What is said of the recipe itself is a list already, which says how many more there are.
        raise ConfigError("\n".join(filter(None, (first, fault_list(more)))))
    warn(*warnings)
    print(f"{escape(str(request.recipe))} is valid" + (f", with {len(warnings)} warning(s)" if warnings else ""))
    return 0


def _sweep_faults(request: Request, trusted: Sequence[str], *, machine: bool) -> list[str]:
    """Return what `run -m` would say of the values that a recipe sweeps."""
    from mlotool.cli.hydra_app import open_sources
    from mlotool.config.sweep_plan import choice_faults, read_sweep
    from mlotool.sweep.driver import worker_environments
    from mlotool.sweep.study import check_study

    try:
        open_sources(request, trusted)
        plan = read_sweep(request.hydra_words())
        if not plan.dimensions:
            return []
        if machine:
            worker_environments(plan)
        if plan.settings["method"] == "optuna" and find_spec("optuna") is not None:
            check_study(plan, has_decisions=False)
    except ConfigError as error:
        return str(error).splitlines()
    return choice_faults(plan)
