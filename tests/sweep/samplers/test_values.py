"""Values of parameters, and their features."""

import math

import numpy as np
import pytest

optuna = pytest.importorskip("optuna")

from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution  # noqa: E402

from mlotool.sweep.samplers.base import at, contains, countable, draw, position  # noqa: E402
from mlotool.sweep.samplers.predictor import Parameter, candidates  # noqa: E402

NUMBERS = [
    FloatDistribution(-1.0, 3.0),
    FloatDistribution(1e-6, 1e-1, log=True),
    FloatDistribution(0.1, 0.7, step=0.2),
    IntDistribution(3, 11),
    IntDistribution(1, 1000, log=True),
    IntDistribution(2, 10, step=4),
]


@pytest.mark.parametrize("distribution", NUMBERS, ids=str)
def test_a_position_is_where_its_value_lies(distribution: FloatDistribution | IntDistribution) -> None:
    for where in np.linspace(0.0, 1.0, 41):
        value = at(distribution, where)
        assert distribution._contains(distribution.to_internal_repr(value))
        assert at(distribution, position(distribution, value)) == pytest.approx(value)
    assert (at(distribution, 0.0), at(distribution, 1.0)) == pytest.approx((distribution.low, distribution.high))


@pytest.mark.parametrize("distribution", NUMBERS, ids=str)
def test_values_are_drawn_from_all_of_a_range(distribution: FloatDistribution | IntDistribution) -> None:
    random = np.random.default_rng(0)
    where = [position(distribution, draw(distribution, random)) for _ in range(4000)]
    # Of a grid with few values the middles of its steps.
    assert np.mean(where) == pytest.approx(0.5, abs=0.03)
    values = countable(distribution, 10)
    if values is not None:
        drawn = [draw(distribution, random) for _ in range(4000)]
        assert all(drawn.count(each) == pytest.approx(4000 / len(values), rel=0.2) for each in values)


def test_values_that_can_be_counted() -> None:
    assert countable(FloatDistribution(0.1, 0.7, step=0.2), 4) == pytest.approx([0.1, 0.3, 0.5, 0.7])
    assert countable(FloatDistribution(0.1, 0.7, step=0.2), 3) is None
    assert countable(IntDistribution(1, 4, log=True), 4) == [1, 2, 3, 4]
    assert countable(CategoricalDistribution(("a", None)), 1) == ["a", None]


def test_what_another_range_does_not_contain() -> None:
    assert contains(IntDistribution(0, 3), 3) and not contains(IntDistribution(0, 2), 3)
    assert contains(CategoricalDistribution(("a", None)), None) and not contains(CategoricalDistribution(("a",)), "b")


def test_a_decision_has_a_feature_a_choice() -> None:
    parameter = Parameter([CategoricalDistribution(("a", True, 1))], start=2)
    assert parameter.columns == slice(2, 5)
    assert parameter.features([1, "a", True]).tolist() == [[0, 0, 1], [1, 0, 0], [0, 1, 0]]


def test_a_number_of_few_values_has_one_a_value_whatever_its_range() -> None:
    parameter = Parameter([IntDistribution(0, 2), IntDistribution(0, 4)], start=0)
    assert parameter.features([4, 0]).tolist() == [[0, 0, 0, 0, 1], [1, 0, 0, 0, 0]]
    assert parameter.options(np.random.default_rng(0)).tolist() == np.eye(5).tolist()


def test_other_numbers_have_cosines_of_their_position_in_all_ranges() -> None:
    parameter = Parameter([FloatDistribution(1e-4, 1e-2, log=True), FloatDistribution(1e-3, 1.0, log=True)], start=0)
    expected = [1.0, math.cos(math.pi / 4), 0.0, math.cos(3 * math.pi / 4) / 3, -0.25]
    assert parameter.features([1e-3])[0].tolist() == pytest.approx(expected)
    assert Parameter([IntDistribution(1, 99)], start=0).features([50])[0].tolist() == pytest.approx(
        [1, 0, -0.5, 0, 0.25]
    )


def test_candidates_of_a_long_range_lie_all_over_it() -> None:
    found = candidates(FloatDistribution(1e-6, 1.0, log=True), np.random.default_rng(0))
    assert len(found) == 64 and found == sorted(found)
    assert found[0] < 2e-6 and found[-1] > 0.5
