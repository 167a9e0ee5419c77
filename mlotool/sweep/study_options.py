"""What `sweep.sampler` and `sweep.pruner` name, made with their options."""

import inspect
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from mlotool.config.schema import PRUNERS, SAMPLERS
from mlotool.core.errors import ConfigError
from mlotool.core.suggest import did_you_mean
from mlotool.sweep.extras import import_extra
from mlotool.sweep.study_storage import import_optuna


def make_sampler(name: str, options: Mapping[str, Any], seed: int) -> Any:
    """Return the sampler that `sweep.sampler` names; options that it does not take are a ConfigError."""
    return _make(import_optuna().samplers, SAMPLERS, "sampler", name, options, seed=seed)


def make_pruner(name: str, options: Mapping[str, Any]) -> Any:
    """Return the pruner that `sweep.pruner` names; options that it does not take are a ConfigError."""
    return _make(import_optuna().pruners, PRUNERS, "pruner", name, options)


def option_faults(settings: Mapping[str, Any]) -> list[str]:
    """Return what Optuna says of `sweep.sampler_options` and `sweep.pruner_options`; nothing where it is missing."""
    if settings["method"] != "optuna" or find_spec("optuna") is None:
        return []
    optuna, faults = import_optuna(), []
    for key, classes, module, given in (
        ("sampler", SAMPLERS, optuna.samplers, {"seed": settings["seed"]}),
        ("pruner", PRUNERS, optuna.pruners, {}),
    ):
        name, options = settings[key], settings[f"{key}_options"] or {}
        # Unknown names, and what are no options, have faults of their own.
        if name in classes and isinstance(options, Mapping):
            try:
                _make(module, classes, key, name, options, **given)
            except ConfigError as error:
                faults.append(str(error))
    return faults


def _make(
    module: Any, classes: Mapping[str, str], key: str, name: str, options: Mapping[str, Any], **given: Any
) -> Any:
    if name == "cmaes":
        # Optuna asks for it at its first own point, when jobs have been trained.
        import_extra("cmaes", "sweep.sampler=cmaes", "optuna")
    kind = getattr(module, classes[name])
    known = [each for each in inspect.signature(kind).parameters if each != "args"]
    given = {each: value for each, value in given.items() if each in known}
    for option in options:
        if option == "seed":
            raise ConfigError(
                f"sweep.{key}_options.seed: found {options['seed']!r}; expected the seed in a key of its own, which "
                "every sampler takes. Write sweep.seed=.."
            )
        if option not in known or option in given:
            expected = ", ".join(each for each in known if each not in given) or "none"
            raise ConfigError(
                f"sweep.{key}_options.{option}: found an option that '{name}' does not have; expected {expected}."
                f"{did_you_mean(option, known)} Correct sweep.{key}_options."
            )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return kind(**given, **options)
    except (TypeError, ValueError, ImportError) as error:
        raise ConfigError(
            f"sweep.{key}: '{name}' does not start with the options {dict(options)} ({error}); expected values that "
            f"optuna.{key}s.{classes[name]} takes. Correct sweep.{key}_options."
        ) from error
