"""What a sweep needs before it begins a study, or goes on with the one that it finds."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlotool.config.sweep_plan import SweepPlan
from mlotool.core.errors import ConfigError
from mlotool.sweep.study_dimensions import distributions_of
from mlotool.sweep.study_storage import import_optuna
from mlotool.sweep.study_values import StudyValues


def check_searchable(plan: SweepPlan, *, has_decisions: bool) -> None:
    """Refuse a search without one objective for all jobs, or with nothing to search.

    Raises:
        ConfigError: with what is missing.
    """
    if plan.objective is None:
        raise ConfigError(
            "objective: found null with sweep=optuna; expected the logged key that the search looks at. "
            "Set objective=val/accuracy."
        )
    if plan.mode is None:
        raise ConfigError(
            f"objective: found '{plan.objective}' in a sweep=optuna that varies what it is judged by; expected one "
            "objective and one objective_mode for all jobs. Take objective, objective_mode, evaluate and recipe "
            "out of what is searched."
        )
    if not plan.dimensions and not has_decisions:
        raise ConfigError(
            "sweep.params: found nothing to search; expected choices or ranges. Write "
            "'problems.<name>.optimizer.lr=tag(log, interval(1e-3, 1e-1))' on the command line, or give a problem "
            "a module of _target_: mlotool.spaces.Space."
        )


def check_study(plan: SweepPlan, *, has_decisions: bool) -> tuple[StudyValues, dict[str, Any]]:
    """Return what the trials of a search find, and what they are drawn from.

    Raises:
        ConfigError: the sweep cannot be searched.
    """
    check_searchable(plan, has_decisions=has_decisions)
    return StudyValues(plan), distributions_of(plan)


def check_new(study: Any, url: str, folder: Path) -> None:
    """Refuse the study of another sweep to a new one: sweeps that share a database name theirs by their folders.

    Raises:
        ConfigError: the study has trials that have begun.
    """
    waiting = import_optuna().trial.TrialState.WAITING
    num_begun = sum(each.state != waiting for each in study.get_trials(deepcopy=False))
    if num_begun:
        raise ConfigError(
            f"sweep.storage: found a study '{study.study_name}' with {num_begun} trials in {url}, while this sweep is "
            f"a new one; expected none of the name of its folder, {folder}. Choose a folder of another name with "
            "hydra.sweep.dir, or go on with the sweep that has this study: resume=<its folder>."
        )


def check_directions(study: Any, expected: Sequence[str], objective: str | None, folder: Path) -> None:
    """Refuse a study that looks for other values.

    Raises:
        ConfigError: it minimizes what this sweep maximizes, or has more objectives, or fewer.
    """
    found = [each.name.lower() for each in study.directions]
    if found != list(expected):
        raise ConfigError(
            f"resume: found a study in {folder} that is to {' and '.join(found)} {objective}; expected one "
            f"that is to {' and '.join(expected)} it. Leave resume out for a new sweep."
        )
