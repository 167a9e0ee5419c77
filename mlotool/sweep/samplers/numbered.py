"""Optuna's samplers, without a memory: what they draw follows from the study, the seed and the trial's number."""

from collections.abc import Callable
from typing import Any

from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from mlotool.sweep.samplers.history import generator


class NumberedSampler(BaseSampler):
    """Makes a sampler anew for each trial, and for each value that is drawn by itself.

    One sampler for a whole study would draw from random numbers that go on from draw to draw: another process, which
    goes on with a study, could not know how many were taken.

    Args:
        make: makes a sampler with a seed.
        seed: of the study.

    Example:
        >>> import optuna
        >>> def first(sampler):
        ...     return optuna.create_study(sampler=sampler).ask().suggest_float("lr", 0, 1)
        >>> make = lambda seed: optuna.samplers.RandomSampler(seed)
        >>> first(NumberedSampler(make, 3)) == first(NumberedSampler(make, 3))
        True
    """

    def __init__(self, make: Callable[[int], BaseSampler], seed: int) -> None:
        self._make, self._seed = make, seed
        self._begun: tuple[int, BaseSampler] | None = None

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        """Begin a trial: one sampler finds the common search space, and draws from it."""
        self._begun = trial.number, self._made(trial)
        self._begun[1].before_trial(study, trial)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Return what is drawn together."""
        return self._of(trial).infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return the values of what is drawn together."""
        return self._of(trial).sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Return a value that is drawn by itself, whatever was drawn before it: a trial that was half drawn goes on."""
        return self._made(trial, param_name).sample_independent(study, trial, param_name, param_distribution)

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Any) -> None:
        """Let a sampler note what a trial has found."""
        self._made(trial).after_trial(study, trial, state, values)

    def _of(self, trial: FrozenTrial) -> BaseSampler:
        if self._begun is None or self._begun[0] != trial.number:
            self._begun = trial.number, self._made(trial)
        return self._begun[1]

    def _made(self, trial: FrozenTrial, *purpose: str) -> BaseSampler:
        return self._make(int(generator(self._seed, trial.number, *purpose).integers(2**32)))
