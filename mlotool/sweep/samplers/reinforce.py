"""REINFORCE: a policy of independent distributions, moved by the policy gradient of each trial."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from annotated_types import Ge
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import FrozenTrial

from mlotool.core.settings import Count, NonNegative, Positive, Seed, checked
from mlotool.sweep.samplers import base
from mlotool.sweep.samplers.base import AbstractHistorySampler, History, Outcome

# A choice by its number, a value, or by its number one of the equal parts of a range, which is drawn from evenly.
Category = tuple[str, Any]
# Of a parameter's categories; those that are not there are zero.
Logits = Mapping[str, Mapping[Category, float]]


@checked
class ReinforceSampler(AbstractHistorySampler[Logits]):
    """REINFORCE with a moving baseline: independent distributions of the parameters, moved by the policy gradient.

    Each parameter has its own categorical distribution `pi = softmax(z)`. A finished trial of score `r` (its value;
    larger is better) changes the logits of its parameters, whose categories were `c`, by

        z += learning_rate * (A * (onehot(c) - pi) + entropy_weight * grad_z H(pi)),

    where the advantage `A` is the mean of `sign(r - r_i)` over the last `baseline_window` scores before it. `A` is
    between -1 and 1, and positive if the trial is better than most, so neither the objective's unit nor a single bad
    run matters. Ranges with more than `num_bins` values are divided into bins, of equal width on the scale of the range
    (linear or logarithmic). Failed trials are left out. The policy follows from the finished trials in their order.

    Args:
        learning_rate: step size of the logits.
        baseline_window: number of earlier trials that a score is compared with.
        entropy_weight: how strongly the policy is drawn to the uniform one, so that a long search goes on exploring.
        num_bins: number of bins of a range.
        seed: seed of the random numbers.

    Raises:
        ConfigError: an option is out of range.

    Example:
        >>> import optuna
        >>> study = optuna.create_study(sampler=ReinforceSampler())
        >>> study.optimize(lambda trial: sum(trial.suggest_int(name, 0, 5) for name in "abcd"), n_trials=100)
        >>> study.best_value < 3
        True

    Source: Williams, "Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning", 1992;
    for architectures: Zoph, Le, "Neural Architecture Search with Reinforcement Learning", 2017; ranks in the place of
    values: Wierstra et al., "Natural Evolution Strategies", 2014, section 3.1.
    """

    def __init__(
        self,
        learning_rate: Positive = 0.3,
        baseline_window: Count = 20,
        entropy_weight: NonNegative = 0.1,
        num_bins: Annotated[int, Ge(2)] = 8,
        seed: Seed = 0,
    ) -> None:
        super().__init__("reinforce")
        self._learning_rate, self._window, self._entropy = learning_rate, baseline_window, entropy_weight
        self._num_bins, self._seed = num_bins, seed

    def begin(self, history: History, number: int) -> Logits:
        """Return the policy after all trials that have finished."""
        logits, outcomes = dict[str, dict[Category, float]](), history.scored
        for index, outcome in enumerate(outcomes):
            before = [earlier.score for earlier in outcomes[max(index - self._window, 0) : index]]
            self._learn(logits, outcome, _advantage(outcome.score, before))
        return logits

    def choose(self, state: Logits, trial: FrozenTrial, name: str, distribution: BaseDistribution) -> Any:
        """Return a value that the policy draws."""
        random = base.generator(self._seed, trial.number, "value", name)
        categories = _categories(distribution, self._num_bins)
        kind, which = categories[int(random.choice(len(categories), p=_probabilities(state.get(name, {}), categories)))]
        if kind == "bin":
            return base.at(distribution, (which + random.random()) / self._num_bins)
        return distribution.choices[which] if isinstance(distribution, CategoricalDistribution) else which

    def _learn(self, logits: dict[str, dict[Category, float]], outcome: Outcome, advantage: float) -> None:
        for name, distribution in outcome.distributions.items():
            own, categories = logits.setdefault(name, {}), _categories(distribution, self._num_bins)
            taken = _category(distribution, outcome.params[name], categories)
            probabilities = _probabilities(own, categories)
            entropy = -sum(probability * math.log(probability) for probability in probabilities if probability > 0)
            for category, probability in zip(categories, probabilities, strict=True):
                gradient = advantage * ((category == taken) - probability)
                if self._entropy and probability > 0:
                    gradient -= self._entropy * probability * (math.log(probability) + entropy)
                own[category] = own.get(category, 0.0) + self._learning_rate * gradient


def _advantage(score: float, before: Sequence[float]) -> float:
    return sum((score > earlier) - (score < earlier) for earlier in before) / len(before) if before else 0.0


def _categories(distribution: BaseDistribution, num_bins: int) -> list[Category]:
    if isinstance(distribution, CategoricalDistribution):
        return [("choice", index) for index in range(len(distribution.choices))]
    values = base.countable(distribution, num_bins)
    if values is not None:
        return [("value", value) for value in values]
    return [("bin", index) for index in range(num_bins)]


def _category(distribution: BaseDistribution, value: Any, categories: Sequence[Category]) -> Category:
    if isinstance(distribution, CategoricalDistribution):
        return categories[int(distribution.to_internal_repr(value))]
    if categories[0][0] == "value":
        # Of a grid of fractions a value that another process wrote may differ in the last bit.
        return min(categories, key=lambda category: abs(category[1] - value))
    return categories[min(int(base.position(distribution, value) * len(categories)), len(categories) - 1)]


def _probabilities(logits: Mapping[Category, float], categories: Sequence[Category]) -> list[float]:
    given = [logits.get(category, 0.0) for category in categories]
    largest = max(given)
    weights = [math.exp(logit - largest) for logit in given]
    total = sum(weights)
    return [weight / total for weight in weights]
