"""Decisions of models in a study: asked of its sampler one by one, kept under `decisions.<name>`."""

import json
from collections.abc import Container, Iterator, Sequence
from functools import partial
from typing import Any

from mlotool.config.found_decisions import decision_faults
from mlotool.core.errors import MlotoolError, RunError
from mlotool.sweep.study_queue import forget_unknown

PREFIX = "decisions."
_DRAWN, _INFEASIBLE, _UNASKED = "drawn", "infeasible", "unasked"
_MAX_REASON = 2_000
_OTHER_VALUES = ("null", "true", "false", "nan", "inf")
"""Words that are no text to Hydra."""


def make_all(trial: Any, draw: Any, words: Sequence[str], storing: Any) -> None:
    """Ask a trial for all decisions of its models, and note which of the recipe's they do not ask for.

    Args:
        trial: of Optuna.
        draw: asks for them, as the models are built.
        words: of the job.
        storing: wraps what writes into the study, as what builds the models takes errors that are not ours for theirs.
    """
    drawn = draw(words, storing(partial(suggest, trial, {})))
    storing(_note_unasked)(trial, [name for name, value in drawn.items() if value is None])


def suggest(trial: Any, decided: dict[str, Any], name: str, candidates: tuple[Any, ...]) -> Any:
    """Ask a trial for a decision; asked again, it answers the same.

    Args:
        trial: of Optuna.
        decided: what it has answered.
        name: of the decision.
        candidates: names, or whole numbers; those of a range are drawn as numbers, so that their count may change.

    Raises:
        RunError: the decision had other names to choose from in an earlier trial.
    """
    if name not in decided:
        forget_unknown(trial, f"{PREFIX}{name}", candidates)
        whole = all(type(each) is int for each in candidates)
        try:
            if whole and candidates == tuple(range(candidates[0], candidates[-1] + 1)):
                decided[name] = trial.suggest_int(f"{PREFIX}{name}", candidates[0], candidates[-1])
            else:
                decided[name] = trial.suggest_categorical(f"{PREFIX}{name}", candidates)
        except MlotoolError:
            raise
        except ValueError as error:
            raise RunError(
                f"decisions.{name}: found the candidates {', '.join(map(str, candidates))[:300]}, others than in an "
                f"earlier trial of the sweep ({error}); expected the same names each time. Where they change, put "
                "what they depend on into its name, choose(f'extra_{depth}', ..), or let it decide by a whole number, "
                "choose(name, range(n)). What has been trained is kept: correct it, and go on by the same command with "
                "resume=auto."
            ) from error
    return decided[name]


def words_of(trial: Any, without: Container[str] = ()) -> tuple[str, ...]:
    """Return the decisions of a trial as overrides, but for some keys; those that it does not ask for are taken out."""
    made = (f"{key}={_word(value)}" for key, value in _decisions(trial) if key not in without)
    return (*made, *(f"~{PREFIX}{name}" for name in _unasked(trial)))


def checked_decisions(trial: Any) -> None:
    """Refuse decisions that are none: a study may be anybody's, and they become words of a job's command line.

    Raises:
        ValueError: with what is wrong.
    """
    found = {key.removeprefix(PREFIX): value for key, value in _decisions(trial)}
    faults = list(decision_faults({"decisions": {**dict.fromkeys(_unasked(trial), 0), **found}}))
    if faults:
        raise ValueError(f"its trial {trial.number}: {faults[0]}"[:300])


def note_drawn(trial: Any) -> None:
    """Note that a trial has all of its decisions."""
    trial.set_user_attr(_DRAWN, True)


def note_infeasible(trial: Any, reason: str) -> None:
    """Note that a trial's decisions make no model."""
    trial.set_user_attr(_INFEASIBLE, reason[:_MAX_REASON])


def _note_unasked(trial: Any, names: Sequence[str]) -> None:
    """Note which decisions of the recipe the models of a trial do not ask for."""
    if list(names) != _unasked(trial):
        trial.set_user_attr(_UNASKED, list(names))


def is_drawn(trial: Any, has_decisions: bool) -> bool:
    """Say whether a trial has all of its decisions."""
    return not has_decisions or trial.user_attrs.get(_DRAWN) is True


def is_infeasible(trial: Any) -> bool:
    """Say whether a trial's decisions make no model."""
    return _INFEASIBLE in trial.user_attrs


def reason_of(trial: Any) -> str | None:
    """Return why a trial's decisions make no model; None where they make one."""
    return str(trial.user_attrs[_INFEASIBLE])[:_MAX_REASON] if is_infeasible(trial) else None


def _decisions(trial: Any) -> Iterator[tuple[str, Any]]:
    return ((key, value) for key, value in trial.params.items() if key.startswith(PREFIX))


def _unasked(trial: Any) -> list[str]:
    found = trial.user_attrs.get(_UNASKED, [])
    return [str(each) for each in found] if isinstance(found, list) else []


def _word(value: Any) -> str:
    """Return a name as a word of Hydra's that is this text and nothing else."""
    is_plain = type(value) is int or (str(value)[:1].isalpha() and value not in _OTHER_VALUES)
    return str(value) if is_plain else json.dumps(value)
