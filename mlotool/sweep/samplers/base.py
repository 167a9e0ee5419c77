"""What samplers of ours have in common: a trial's values follow from the study's history, the seed and its number."""

from abc import abstractmethod
from typing import Any, Generic, TypeVar

from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial

from mlotool.core.errors import ConfigError
from mlotool.sweep.samplers.history import History, read_history

_NUM_TRIALS_KEPT = 16
"""How many trials may take their values by turns without reading the history again."""

State = TypeVar("State")


class AbstractHistorySampler(BaseSampler, Generic[State]):
    """Draws each value when it is asked for, from what a trial's beginning has made of the study's history.

    Nothing is kept but what can be computed again: another process with the same study and seed draws the same values.

    Args:
        name: what `sweep.sampler` calls it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._states: dict[tuple[str, int], State] = {}

    @abstractmethod
    def begin(self, history: History, number: int) -> State:
        """Return what the values of trial `number` are drawn from."""

    @abstractmethod
    def choose(self, state: State, trial: FrozenTrial, name: str, distribution: BaseDistribution) -> Any:
        """Return a value; `trial.params` are those that were drawn before."""

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        """Forget a trial of the same number, which was another study's of this name."""
        self._states.pop((study.study_name, trial.number), None)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Return nothing: which parameters a trial has is known when they are asked for."""
        return {}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return nothing, as above."""
        return {}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Return a parameter's value.

        Raises:
            ConfigError: the study has several objectives.
        """
        key = (study.study_name, trial.number)
        if key not in self._states:
            while len(self._states) >= _NUM_TRIALS_KEPT:
                self._states.pop(next(iter(self._states)))
            self._states[key] = self.begin(read_history(study, trial.number, self._name), trial.number)
        return self.choose(self._states[key], trial, param_name, param_distribution)


def check_whole(name: str, value: Any, least: int) -> None:
    """Refuse an option that is no whole number of at least `least`.

    Raises:
        ConfigError: with what was found.
    """
    if type(value) is not int or value < least:
        raise ConfigError(
            f"sweep.sampler_options.{name}: found {value!r}; expected a whole number of at least {least}. Correct "
            f"sweep.sampler_options.{name}."
        )


def check_number(name: str, value: Any, low: float, high: float = float("inf"), *, above: bool = False) -> None:
    """Refuse an option that is no number from `low` to `high`; with `above`, `low` itself is too small.

    Raises:
        ConfigError: with what was found.
    """
    is_number = type(value) in (int, float)
    if not is_number or not low <= value <= high or value == float("inf") or (above and value == low):
        least = f"above {low:g}" if above else f"of at least {low:g}"
        most = "" if high == float("inf") else f" and at most {high:g}"
        raise ConfigError(
            f"sweep.sampler_options.{name}: found {value!r}; expected a number {least}{most}. Correct "
            f"sweep.sampler_options.{name}."
        )
