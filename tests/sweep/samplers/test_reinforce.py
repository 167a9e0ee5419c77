"""The policy gradient against its definition."""

import math
from collections.abc import Mapping

import pytest

optuna = pytest.importorskip("optuna")

from optuna.distributions import CategoricalDistribution  # noqa: E402

from mlotool.sweep.samplers.base import History, Outcome  # noqa: E402
from mlotool.sweep.samplers.reinforce import Cell, ReinforceSampler  # noqa: E402

KIND = CategoricalDistribution(("a", "b", "c"))


def outcomes(*given: tuple[str, float]) -> tuple[Outcome, ...]:
    return tuple(Outcome(number, score, {"kind": kind}, {"kind": KIND}) for number, (kind, score) in enumerate(given))


def history(*given: tuple[str, float]) -> History:
    return History("study", outcomes(*given), frozenset())


def objective(logits: Mapping[Cell, float], taken: int, advantage: float, entropy_weight: float) -> float:
    """Return what a trial's step climbs: its advantage times the logarithm of its probability, and the entropy."""
    total = sum(math.exp(each) for each in logits.values())
    chances = [math.exp(each) / total for each in logits.values()]
    return advantage * math.log(chances[taken]) - entropy_weight * sum(each * math.log(each) for each in chances)


@pytest.mark.parametrize("entropy_weight", [0.0, 0.3])
def test_a_step_is_the_gradient_by_finite_differences(entropy_weight: float) -> None:
    rate, size = 0.5, 1e-6
    trials = (("a", 1.0), ("b", 2.0), ("c", 3.0), ("a", 2.5))
    before, after = (
        ReinforceSampler(rate, entropy_weight=entropy_weight).begin(history(*trials[:count]), count)["kind"]
        for count in (3, 4)
    )
    # 2.5 is better than two of the three scores before it.
    advantage = 1 / 3
    for cell, logit in before.items():
        moved = [{**before, cell: logit + step} for step in (size, -size)]
        up, down = (objective(each, 0, advantage, entropy_weight) for each in moved)
        assert after[cell] - logit == pytest.approx(rate * (up - down) / (2 * size), abs=1e-8)


def test_the_baseline_moves() -> None:
    """A score is compared with the last ones alone."""
    trials = [("a", 9.0)] * 5 + [("b", 1.0)] * 3
    for window, sign in ((3, 1), (20, -1)):
        sampler = ReinforceSampler(entropy_weight=0.0, baseline_window=window)
        before, after = (sampler.begin(history(*each), 9) for each in (trials, [*trials, ("c", 2.0)]))
        assert sign * (after["kind"]["choice", 2] - before["kind"]["choice", 2]) > 0


def test_the_unit_of_the_objective_does_not_matter() -> None:
    trials = [("a", 1.0), ("b", 2.0), ("c", -1e9), ("b", 3.0)]
    one = ReinforceSampler().begin(history(*trials), 4)
    assert one == ReinforceSampler().begin(history(*((kind, 1e3 * score - 7) for kind, score in trials)), 4)
