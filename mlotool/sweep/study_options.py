"""What `sweep.sampler` and `sweep.pruner` name, made with their options."""

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mlotool.config.schema import OWN_SAMPLERS, PRUNERS, SAMPLERS
from mlotool.config.sweeps.sweep_plan import SweepPlan
from mlotool.core.errors import ConfigError, WriteError
from mlotool.core.messages import did_you_mean
from mlotool.core.settings import parameters, setting_fault

# Options of samplers that say how many trials they draw at random at first.
_RANDOM = ("n_startup_trials", "num_startup_trials", "population_size")


def import_extra(module: str, key: str, extra: str) -> Any:
    """Import a package that an extra of ours brings.

    Args:
        module: its name.
        key: the setting that wants it, as it was written.
        extra: of `pip install mlotool[..]`.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{key}: the package {error.name} is not installed. Run: pip install 'mlotool[{extra}]'"
        ) from error


def import_optuna() -> Any:
    """Return the package, which says nothing below a warning; a missing one is a ConfigError."""
    optuna = import_extra("optuna", "sweep=optuna", "optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def open_storage(url: str) -> Any:
    """Open the database of a study.

    Raises:
        ConfigError: it does not open.
    """
    optuna = import_optuna()
    # Workers write at the same time: SQLite waits so many seconds for another one's lock.
    arguments = {"connect_args": {"timeout": 60}} if url.startswith("sqlite:") else {}
    try:
        return optuna.storages.RDBStorage(url, engine_kwargs=arguments)
    # SQLAlchemy's errors have no common base but this, and a driver that is missing is an ImportError.
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"sweep.storage: found '{url}', which does not open ({reason}). Write sqlite:////folder/study.db."
        ) from error


@contextmanager
def storing(url: str) -> Iterator[None]:
    """Turn the errors of a study's database, of which a full disk is one, into a WriteError."""
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (StorageInternalError, SQLAlchemyError) as error:
        cause = error.__cause__ or error
        raise WriteError(
            f"sweep.storage: the database {url} cannot store the study ({str(cause).splitlines()[0]}); expected space "
            "on its disk. Free some, then repeat the command with resume=auto."
        ) from error


def check_own_study(folder: Path, name: str, sampler: str) -> None:
    """Refuse a study in a sweep's folder, which may be a stranger's, whose sampler reads pickles."""
    if sampler == "cmaes" and (folder / name).exists():
        # Optuna keeps the state of CMA-ES as a pickle in the study, and unpickles whatever stands there.
        raise ConfigError(
            f"resume: found a study in {folder} with sweep.sampler=cmaes, whose state is a pickle, which can run code; "
            f"expected another sampler, or your consent: sweep.storage=sqlite:///{(folder / name).absolute()}"
        )


def make_sampler(name: str, options: Mapping[str, Any], seed: int) -> Any:
    """Return the sampler that `sweep.sampler` names; options that it does not take are a ConfigError."""
    if name == "cmaes":
        # Optuna asks for it at its first own point, when jobs have been trained.
        import_extra("cmaes", "sweep.sampler=cmaes", "optuna")
    return _make(_sampler_class(name), "sampler", name, options, seed)


def num_random_trials(name: str, options: Mapping[str, Any]) -> int:
    """Return how many trials a sampler draws at random before it looks at results."""
    known = ((key, taken.default) for key, taken in parameters(_sampler_class(name)).items() if key in _RANDOM)
    return next((options.get(key, default) for key, default in known), 0)


def make_study_sampler(name: str, options: Mapping[str, Any], seed: int) -> Any:
    """Return a sampler whose draws do not depend on how often a study has been gone on with; checked like the other."""
    sampler = make_sampler(name, options, seed)
    # A sequence is kept in the study, with its seed; our own samplers draw by a trial's number.
    if name in ("qmc", *OWN_SAMPLERS):
        return sampler
    from mlotool.sweep.samplers.base import NumberedSampler

    return NumberedSampler(partial(make_sampler, name, options), seed)


def sampler_options(plan: SweepPlan, *, has_decisions: bool) -> dict[str, Any]:
    """Return the options of a sweep's sampler, with those of ours where the user has none."""
    settings, own = plan.settings, dict[str, Any]()
    if settings["sampler"] == "tpe" and plan.group_size > 1:
        # The jobs of a group are drawn before one of them has ended: a draw takes those before it for bad ones.
        own["constant_liar"] = True
    if settings["sampler"] == "tpe" and has_decisions:
        # Decisions depend on one another; some there are only in some models.
        own |= {"multivariate": True, "group": True}
    options = own | dict(settings["sampler_options"])
    if options.get("multivariate") is False and "group" not in settings["sampler_options"]:
        options.pop("group", None)
    return options


# Of a run, the part in which `median` and `percentile` end no trial; and by how much `successive_halving` divides.
# By benchmarks/exploration/pruners.py: from the first evaluation on, twins of the best trial are ended.
_WARMUP, _REDUCTION = 3, 3


def pruner_options(plan: SweepPlan) -> dict[str, Any]:
    """Return the options of a sweep's pruner, with those of ours where the user has none.

    They are in ticks: parts of a run, up to the next evaluation of the objective.
    """
    name, options = plan.settings["pruner"], dict(plan.settings["pruner_options"])
    if plan.last_tick is None:
        return options
    own, every = dict[str, Any](), plan.evaluation_interval or 1
    if name in ("median", "percentile"):
        own["n_warmup_steps"] = every * math.ceil(plan.last_tick / _WARMUP / every)
    elif name == "successive_halving":
        factor = options.get("reduction_factor", _REDUCTION)
        own = {"reduction_factor": factor, "min_resource": every * math.ceil(plan.last_tick / factor**2 / every)}
    return own | options


def make_pruner(name: str, options: Mapping[str, Any]) -> Any:
    """Return the pruner that `sweep.pruner` names; options that it does not take are a ConfigError."""
    return _make(getattr(import_optuna().pruners, PRUNERS[name]), "pruner", name, options)


def option_faults(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with `sweep.sampler_options` and `sweep.pruner_options`; nothing where Optuna is missing."""
    if settings["method"] != "optuna" or find_spec("optuna") is None:
        return
    make_seeded = partial(make_sampler, seed=settings["seed"])
    for key, classes, make in (("sampler", SAMPLERS, make_seeded), ("pruner", PRUNERS, make_pruner)):
        name, options = settings[key], settings[f"{key}_options"] or {}
        # Unknown names, and what are no options, have faults of their own.
        if name in classes and isinstance(options, Mapping):
            try:
                make(name, options)
            except ConfigError as error:
                yield str(error)


def _sampler_class(name: str) -> Any:
    samplers = import_optuna().samplers
    # Ours derive from Optuna's, and are imported once it is known to be there.
    module = import_module(f"mlotool.sweep.samplers.{name}") if name in OWN_SAMPLERS else samplers
    return getattr(module, SAMPLERS[name])


def _make(kind: Any, key: str, name: str, options: Mapping[str, Any], seed: int | None = None) -> Any:
    known = {option: taken.annotation for option, taken in parameters(kind).items() if option not in ("args", "seed")}
    for option, value in options.items():
        if option not in known:
            expected = "sweep.seed" if option == "seed" else ", ".join(known) or "none"
            raise ConfigError(
                f"sweep.{key}_options.{option}: found an option that '{name}' does not have; expected {expected}."
                f"{did_you_mean(option, known)} Correct sweep.{key}_options."
            )
        if fault := setting_fault(f"sweep.{key}_options.{option}", value, known[option]):
            raise ConfigError(fault)
    given = {"seed": seed} if "seed" in parameters(kind) else {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return kind(**given, **options)
    except (TypeError, ValueError, ImportError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"sweep.{key}: '{name}' does not start with the options {dict(options)} ({error}). Correct them."
        ) from error
