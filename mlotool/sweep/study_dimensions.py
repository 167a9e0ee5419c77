"""What the command line varies, as the distributions of a study, and whether a study's trials are drawn from them."""

from collections.abc import Mapping
from typing import Any

from mlotool.config.sweep_plan import Dimension, SweepPlan
from mlotool.core.errors import ConfigError
from mlotool.sweep.study_decisions import checked_decisions
from mlotool.sweep.study_storage import import_optuna


def distributions_of(plan: SweepPlan) -> dict[str, Any]:
    """Return what the value of each key of a sweep is drawn from.

    Raises:
        ConfigError: an interval of real numbers, of which each value is to be tried.
    """
    if plan.settings["sampler"] == "brute_force":
        _check_countable(plan)
    return {each.key: _distribution(each) for each in plan.dimensions}


def check_values(trial: Any, distributions: Mapping[str, Any]) -> None:
    """Refuse values that the command line does not have: they become words of a job's command line.

    Raises:
        ValueError: with what is wrong.
    """
    for key, distribution in distributions.items():
        if not isinstance(trial.number, int) or trial.distributions[key] != distribution:
            raise ValueError(f"its trial {trial.number} draws {key} from {trial.distributions[key]}"[:300])
        value = distribution.to_internal_repr(trial.params[key])
        if not distribution._contains(value) or trial.params[key] != distribution.to_external_repr(value):
            raise ValueError(f"its trial {trial.number} has {key}={trial.params[key]!r}"[:300])
    checked_decisions(trial)


def _check_countable(plan: SweepPlan) -> None:
    for each in plan.dimensions:
        if each.low is not None and not each.whole and each.step is None:
            raise ConfigError(
                f"{each.key}: found an interval with sweep.sampler=brute_force, which tries every value; expected "
                f"choices, or a range with a step. Write {each.key}=0.01,0.1, or choose another sampler."
            )


def _distribution(dimension: Dimension) -> Any:
    kinds = import_optuna().distributions
    if dimension.low is None or dimension.high is None:
        return kinds.CategoricalDistribution(dimension.choices)
    if dimension.whole:
        step = int(dimension.step or 1)
        return kinds.IntDistribution(int(dimension.low), int(dimension.high), log=dimension.log, step=step)
    return kinds.FloatDistribution(dimension.low, dimension.high, log=dimension.log, step=dimension.step)
