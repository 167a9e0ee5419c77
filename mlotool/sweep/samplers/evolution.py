"""Regularized evolution: the oldest members of the population are removed, regardless of their value."""

from dataclasses import dataclass
from typing import Any

from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial

from mlotool.core.settings import Count, Seed, checked
from mlotool.sweep.samplers import base
from mlotool.sweep.samplers.base import AbstractHistorySampler, History, Outcome

# A parameter with more values is redrawn without a look at which were tried.
_MOST_VALUES = 1000


@dataclass(frozen=True)
class Mutation:
    """A parent and what its child has in another way.

    Args:
        parent: whose values the child takes where it may.
        name: of the parameter that is redrawn.
        values: what it is redrawn from; None for all of its range.
    """

    parent: Outcome
    name: str
    values: list[Any] | None


@checked
class EvolutionSampler(AbstractHistorySampler[Mutation | None]):
    """Regularized (aging) evolution.

    The population consists of the last `population_size` trials that finished. `sample_size` of them are drawn with
    replacement, and the best is the parent. The child has the parent's values except for one parameter, which is drawn
    anew. Values that the parent does not have, or that the child may not have (as its range differs), are drawn at
    random. Until there is a population, all values are random.

    Mutations to settings that were tried before are avoided if possible, since a run with the same values and seed
    would have the same result. Failed trials count as the worst of the population.

    Args:
        population_size: number of trials that may be parents; as many first trials are random.
        sample_size: number of trials from which the best becomes the parent; a larger number searches more greedily.
        seed: seed of the random numbers.

    Raises:
        ConfigError: an option is out of range.

    Example:
        >>> import optuna
        >>> study = optuna.create_study(sampler=EvolutionSampler(population_size=8, sample_size=4))
        >>> study.optimize(lambda trial: sum(trial.suggest_int(name, 0, 5) for name in "abcd"), n_trials=60)
        >>> study.best_value < 3
        True

    Source: Real, Aggarwal, Huang, Le, "Regularized Evolution for Image Classifier Architecture Search", 2019,
    algorithm 1.
    """

    def __init__(self, population_size: Count = 20, sample_size: Count = 10, seed: Seed = 0) -> None:
        super().__init__("evolution")
        self._population_size, self._sample_size, self._seed = population_size, sample_size, seed

    def begin(self, history: History, number: int) -> Mutation | None:
        """Return the mutation that makes a trial, or None for a random one."""
        population = history.outcomes[-self._population_size :]
        if len(population) < self._population_size:
            return None
        random = base.generator(self._seed, number, "parent")
        sample = random.integers(len(population), size=self._sample_size)
        # Of equal ones the youngest.
        parent = max((population[position] for position in sample), key=lambda outcome: (outcome.score, outcome.number))
        names = [name for name, distribution in parent.distributions.items() if not distribution.single()]
        if parent not in history.scored or not names:
            return None
        names = [names[position] for position in random.permutation(len(names))]
        mutations = [Mutation(parent, name, _others(parent, name)) for name in names]
        for mutation in mutations:
            untried = _untried(mutation, history)
            if untried is None or untried:
                return Mutation(parent, mutation.name, untried)
        return mutations[0]

    def choose(self, state: Mutation | None, trial: FrozenTrial, name: str, distribution: BaseDistribution) -> Any:
        """Return the parent's value, or another one."""
        random = base.generator(self._seed, trial.number, "value", name)
        if state is not None and name == state.name:
            values = [value for value in state.values or () if base.contains(distribution, value)]
            return values[int(random.integers(len(values)))] if values else base.draw(distribution, random)
        if state is not None and name in state.parent.params and base.contains(distribution, state.parent.params[name]):
            # As this distribution has it: 3 for the 3.0 of a study that another program wrote.
            return distribution.to_external_repr(distribution.to_internal_repr(state.parent.params[name]))
        return base.draw(distribution, random)


def _others(parent: Outcome, name: str) -> list[Any] | None:
    values = base.countable(parent.distributions[name], _MOST_VALUES)
    return None if values is None else [value for value in values if value != parent.params[name]]


def _untried(mutation: Mutation, history: History) -> list[Any] | None:
    if mutation.values is None:
        return None
    rest = frozenset((name, value) for name, value in mutation.parent.params.items() if name != mutation.name)
    return [value for value in mutation.values if rest | {(mutation.name, value)} not in history.tried]
