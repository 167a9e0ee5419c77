"""What each sampler of ours does in any space; its draws follow from the study, the seed and a trial's number."""

import math
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from statistics import mean
from typing import Any

import numpy as np
import pytest

optuna = pytest.importorskip("optuna")

from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution  # noqa: E402

from mlotool.core.errors import ConfigError  # noqa: E402
from mlotool.sweep.samplers import predictor  # noqa: E402
from mlotool.sweep.samplers.base import (  # noqa: E402
    History,
    Outcome,
    at,
    contains,
    countable,
    draw,
    position,
    read_history,
)
from mlotool.sweep.samplers.evolution import EvolutionSampler  # noqa: E402
from mlotool.sweep.samplers.predictor import Parameter, PredictorSampler, Weights, evaluate  # noqa: E402
from mlotool.sweep.samplers.reinforce import Category, ReinforceSampler  # noqa: E402

Make = Callable[[int], Any]
MAKERS: dict[str, Make] = {
    "evolution": lambda seed: EvolutionSampler(population_size=8, sample_size=4, seed=seed),
    "reinforce": lambda seed: ReinforceSampler(seed=seed),
    "predictor": lambda seed: PredictorSampler(num_startup_trials=8, seed=seed),
}
each_sampler = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def conditional(trial: Any) -> float:
    """Return a loss of a space with parameters that only some trials have, and a range that differs by trial."""
    kind = trial.suggest_categorical("kind", ("linear", "deep", "wide"))
    loss = (math.log10(trial.suggest_float("rate", 1e-4, 1e-1, log=True)) + 2.0) ** 2
    if kind == "deep":
        num_layers = trial.suggest_int("num_layers", 2, 6)
        loss += abs(num_layers - 4) / 4
        loss += trial.suggest_int("skip_from", 0, num_layers - 1) / 10
        loss += 0.3 if trial.suggest_categorical("norm", (True, False)) else 0.0
    elif kind == "wide":
        loss += 1.0 - trial.suggest_float("dropout", 0.0, 0.5, step=0.1)
        loss += trial.suggest_int("width", 8, 512, log=True) / 512
    else:
        loss += 1.5
    return float(loss)


def values_of(study: Any) -> list[dict[str, Any]]:
    return [trial.params for trial in study.trials]


@each_sampler
def test_a_study_that_goes_on_draws_as_one_that_was_never_interrupted(make: Make) -> None:
    whole = optuna.create_study(sampler=make(1))
    whole.optimize(conditional, n_trials=20)
    storage = optuna.storages.InMemoryStorage()
    optuna.create_study(storage=storage, study_name="study", sampler=make(1)).optimize(conditional, n_trials=8)
    for num_trials in (1, 11):
        study = optuna.load_study(storage=storage, study_name="study", sampler=make(1))
        study.optimize(conditional, n_trials=num_trials)
    assert values_of(study) == values_of(whole)


@each_sampler
def test_the_order_in_which_workers_ask_does_not_matter(make: Make) -> None:
    """Trials that are open at once take their values by turns; the order of their names does not matter either."""
    space = {name: FloatDistribution(0.0, 1.0) for name in "abc"}
    found = []
    for by_turns in (False, True):
        study = optuna.create_study(sampler=make(0))
        for _ in range(10):
            trial = study.ask(space)
            study.tell(trial, sum(trial.params.values()))
        if by_turns:
            one, two = study.ask(), study.ask()
            for name in "abc":
                for trial in (two, one):
                    trial.suggest_float(name, 0.0, 1.0)
        else:
            one, two = study.ask(space), study.ask(space)
        found.append((one.params, two.params))
        assert one.params != two.params
    assert found[0] == found[1]


@each_sampler
def test_a_trial_keeps_to_what_was_known_when_it_began(make: Make) -> None:
    """Its values are drawn from one state, even if another trial ends between two of them."""
    found = []
    for ends_early in (False, True):
        study = optuna.create_study(sampler=make(0))
        study.optimize(conditional, n_trials=12)
        trial, other = study.ask(), study.ask()
        trial.suggest_categorical("kind", ("linear", "deep", "wide"))
        other.suggest_categorical("kind", ("linear", "deep", "wide"))
        if ends_early:
            study.tell(other, -100.0)
        trial.suggest_float("rate", 1e-4, 1e-1, log=True)
        found.append(trial.params)
    assert found[0] == found[1]


@each_sampler
def test_draws_follow_the_seed_and_the_scores_alone(make: Make) -> None:
    """Not what another study of the name has taught, nor the direction."""
    one, other, found = make(0), make(1), []
    for sampler, sign in ((one, 1), (one, 1), (make(0), -1), (other, 1)):
        study = optuna.create_study(study_name="one", sampler=sampler, direction=DIRECTIONS[sign])
        study.optimize(lambda trial, sign=sign: sign * conditional(trial), n_trials=12)
        found.append(values_of(study))
    assert found[0] == found[1] == found[2]
    assert all(first != second for first, second in zip(found[0], found[3], strict=True))


DIRECTIONS = {1: "minimize", -1: "maximize"}
CHOICES = tuple("abcde")

NUMBERS = [
    FloatDistribution(-1.0, 3.0),
    FloatDistribution(1e-6, 1e-1, log=True),
    FloatDistribution(0.1, 0.7, step=0.2),
    IntDistribution(3, 11),
    IntDistribution(1, 1000, log=True),
    IntDistribution(2, 10, step=4),
]


@pytest.mark.parametrize("distribution", NUMBERS, ids=str)
def test_a_position_is_where_its_value_lies_and_draws_lie_everywhere(distribution: Any) -> None:
    for where in np.linspace(0.0, 1.0, 41):
        value = at(distribution, where)
        assert contains(distribution, value)
        assert at(distribution, position(distribution, value)) == pytest.approx(value)
    assert (at(distribution, 0.0), at(distribution, 1.0)) == pytest.approx((distribution.low, distribution.high))
    random = np.random.default_rng(0)
    drawn = [draw(distribution, random) for _ in range(4000)]
    # Of a grid with few values the middles of its steps.
    assert mean(position(distribution, value) for value in drawn) == pytest.approx(0.5, abs=0.03)
    values = countable(distribution, 10) or []
    assert all(drawn.count(each) == pytest.approx(4000 / len(values), rel=0.2) for each in values)


@each_sampler
def test_distributions_that_are_given_at_once(make: Make) -> None:
    space = {
        "kind": CategoricalDistribution(("a", 1, None, True)),
        "one": CategoricalDistribution(("only",)),
        **{str(number): distribution for number, distribution in enumerate(NUMBERS)},
    }
    study = optuna.create_study(sampler=make(0))
    for _ in range(30):
        trial = study.ask(space)
        assert trial.params.keys() == space.keys()
        for name, distribution in space.items():
            assert contains(distribution, trial.params[name])
        study.tell(trial, trial.params["0"])


def separable(trial: Any) -> float:
    return float(sum(CHOICES.index(trial.suggest_categorical(str(each), CHOICES)) for each in range(4)))


def failing(trial: Any) -> float:
    value = separable(trial)
    if trial.params["0"] == "a":
        raise ArithmeticError
    return math.inf if value > 10 else value


def pruned(trial: Any) -> float:
    """Report its value, after a worse one; three of four trials are pruned."""
    value = separable(trial)
    trial.report(value + 10.0, 1)
    trial.report(value, 2)
    if trial.number % 4:
        raise optuna.TrialPruned
    return value


@pytest.mark.one_in(2)
@each_sampler
@pytest.mark.parametrize("objective", [failing, pruned])
def test_late_trials_are_better_than_random_ones(objective: Callable[[Any], float], make: Make) -> None:
    """The best that does not fail is worth 0, or 1; a random point is worth 8."""
    late = []
    for seed in range(3):
        study = optuna.create_study(sampler=make(seed))
        study.optimize(objective, n_trials=60, catch=(ArithmeticError,))
        late += [separable(trial) for trial in study.trials[30:]]
    assert mean(late) < 6.5


@each_sampler
def test_trials_that_fail_or_were_fixed_by_another_process_and_two_objectives(make: Make) -> None:
    study = optuna.create_study(sampler=make(0))
    for _ in range(40):
        trial = study.ask({"0": CategoricalDistribution(CHOICES)})
        study.tell(trial, state=optuna.trial.TrialState.FAIL)
    assert {trial.params["0"] for trial in study.trials} == set(CHOICES)
    study = optuna.create_study(sampler=make(0))
    for _ in range(12):
        study.enqueue_trial({"0": "c"})
    study.optimize(separable, n_trials=30)
    assert len({trial.params["0"] for trial in study.trials[12:]}) > 1
    study = optuna.create_study(directions=["minimize", "maximize"], sampler=make(0))
    with pytest.raises(ConfigError, match=r"sweep\.sampler: found '\w+' with 2 objectives; expected one.*=nsga2"):
        study.ask().suggest_float("rate", 0.0, 1.0)


SPACE = {name: CategoricalDistribution(tuple(range(6))) for name in "abcd"}


def run(study: Any, num_trials: int) -> None:
    for _ in range(num_trials):
        trial = study.ask(SPACE)
        study.tell(trial, sum(trial.params.values()))


def distance(one: dict[str, Any], other: dict[str, Any]) -> int:
    return sum(one[name] != other[name] for name in SPACE)


def test_a_child_differs_from_one_of_the_last_trials_by_one_parameter() -> None:
    study = optuna.create_study(sampler=EvolutionSampler(population_size=6, sample_size=3))
    run(study, 40)
    points = [trial.params for trial in study.trials]
    for number in range(6, 40):
        assert min(distance(points[number], each) for each in points[number - 6 : number]) == 1
    # The first ones are random.
    assert min(distance(points[number], each) for number in range(6) for each in points[:number]) > 1


def test_the_parent_is_the_best_of_those_that_are_still_there() -> None:
    """With a sample that is sure to hold all of the population."""
    study = optuna.create_study(sampler=EvolutionSampler(population_size=4, sample_size=200))
    for each in (0, 2, 5, 5):
        study.enqueue_trial(dict.fromkeys("abcd", each))
    run(study, 5)
    assert distance(study.trials[4].params, dict.fromkeys("abcd", 0)) == 1
    study.enqueue_trial(dict.fromkeys("abcd", 5))
    run(study, 2)
    # The first one has died, though it is the best of all; its child is what is best now.
    assert distance(study.trials[6].params, study.trials[4].params) == 1
    assert distance(study.trials[6].params, dict.fromkeys("abcd", 0)) > 0
    for _ in range(4):
        study.enqueue_trial(dict.fromkeys("abcd", 4))
    run(study, 5)
    assert distance(study.trials[-1].params, dict.fromkeys("abcd", 4)) == 1


def test_no_point_is_tried_twice_while_its_parent_has_others() -> None:
    study = optuna.create_study(sampler=EvolutionSampler(population_size=4, sample_size=4, seed=2))
    run(study, 60)
    assert len({tuple(trial.params.values()) for trial in study.trials}) == 60
    # A space that is used up goes on.
    study = optuna.create_study(sampler=EvolutionSampler(population_size=3, sample_size=2))
    for _ in range(12):
        trial = study.ask()
        study.tell(trial, trial.suggest_int("a", 0, 1) + trial.suggest_int("b", 0, 1))
    assert len({tuple(trial.params.values()) for trial in study.trials}) == 4


def test_a_parent_that_failed_has_no_children() -> None:
    study = optuna.create_study(sampler=EvolutionSampler(population_size=4, sample_size=2))
    failed = optuna.trial.TrialState.FAIL
    for _ in range(12):
        study.tell(study.ask(SPACE), state=failed)
    points = [trial.params for trial in study.trials]
    assert max(distance(points[number], points[number - 1]) for number in range(4, 12)) > 2


def test_what_the_parent_may_not_give_is_drawn() -> None:
    study = optuna.create_study(sampler=EvolutionSampler(population_size=2, sample_size=2))
    for number in range(20):
        trial = study.ask()
        trial.suggest_int("index", 10 * number, 10 * number + 9)
        study.tell(trial, trial.suggest_float("x", 0.0, 1.0))
    assert len({trial.params["x"] for trial in study.trials}) > 2


KIND = CategoricalDistribution(("a", "b", "c"))


def outcomes(*given: tuple[str, float]) -> tuple[Outcome, ...]:
    return tuple(Outcome(number, score, {"kind": kind}, {"kind": KIND}) for number, (kind, score) in enumerate(given))


def history(*given: tuple[str, float]) -> History:
    return History("study", outcomes(*given), frozenset())


def objective(logits: Mapping[Category, float], taken: int, advantage: float, entropy_weight: float) -> float:
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
    for category, logit in before.items():
        moved = [{**before, category: logit + step} for step in (size, -size)]
        up, down = (objective(each, 0, advantage, entropy_weight) for each in moved)
        assert after[category] - logit == pytest.approx(rate * (up - down) / (2 * size), abs=1e-8)


def test_the_baseline_moves() -> None:
    """A score is compared with the last ones alone."""
    trials = [("a", 9.0)] * 5 + [("b", 1.0)] * 3
    for window, sign in ((3, 1), (20, -1)):
        sampler = ReinforceSampler(entropy_weight=0.0, baseline_window=window)
        before, after = (sampler.begin(history(*each), 9) for each in (trials, [*trials, ("c", 2.0)]))
        assert sign * (after["kind"]["choice", 2] - before["kind"]["choice", 2]) > 0


def test_a_policy_that_learns_on_is_the_one_of_all_trials() -> None:
    trials = [("a", 1.0), ("b", 2.0), ("c", 0.0), ("b", 3.0), ("a", -1.0)]
    sampler = ReinforceSampler()
    found = [sampler.begin(history(*trials[:count]), count) for count in (2, 4, 5)]
    assert found[-1] == ReinforceSampler().begin(history(*trials), 5)
    # Another order, as of a trial that was found late.
    assert sampler.begin(history(*trials[::-1]), 5) == ReinforceSampler().begin(history(*trials[::-1]), 5)


GROUPS = np.array([0, 0, 0, 1, 1, 2, 2])


def points(count: int, seed: int) -> np.ndarray:
    """Return points with a decision of three, one of two, and two features of a number that some points do not have."""
    random = np.random.default_rng(seed)
    three, two = np.eye(3)[random.integers(3, size=count)], np.eye(2)[random.integers(2, size=count)]
    number = random.standard_normal((count, 2)) * (random.random((count, 1)) < 0.7)
    return np.concatenate([three, two, number], 1)


def explicit(features: np.ndarray) -> np.ndarray:
    """Return a constant, the features, and the products of features of different parameters."""
    pairs = [(i, j) for i in range(7) for j in range(i) if GROUPS[i] != GROUPS[j]]
    products = np.stack([features[:, i] * features[:, j] for i, j in pairs], 1)
    return np.concatenate([np.ones((len(features), 1)), features, products], 1)


def test_draws_have_the_posterior_of_the_regression_with_all_products(monkeypatch: pytest.MonkeyPatch) -> None:
    share, noise = 0.3, 0.1
    monkeypatch.setattr(predictor, "_PAIR_SHARES", (share,))
    monkeypatch.setattr(predictor, "_NOISES", (noise,))
    features, others = points(12, 0), points(5, 1)
    targets = np.random.default_rng(2).standard_normal(12)
    singles, pairs = explicit(features)[:, 1:8], explicit(features)[:, 8:]
    variances = np.concatenate(
        [
            [1.0],
            np.full(7, (1 - share) / np.mean((singles**2).sum(1))),
            np.full(pairs.shape[1], share / np.mean((pairs**2).sum(1))),
        ]
    )
    precision = explicit(features).T @ explicit(features) / noise + np.diag(1 / variances)
    mean = explicit(others) @ np.linalg.solve(precision, explicit(features).T @ targets / noise)
    covariance = explicit(others) @ np.linalg.inv(precision) @ explicit(others).T

    random = np.random.default_rng(3)
    draws = np.stack([evaluate(predictor.draw_weights(features, GROUPS, targets, random), others) for _ in range(4000)])
    assert draws.mean(0) == pytest.approx(mean, abs=0.06)
    assert np.abs(np.cov(draws.T) - covariance).max() < 0.06


@pytest.mark.parametrize("interacts", [False, True])
def test_with_enough_data_a_draw_is_the_function_itself(interacts: bool) -> None:
    features, others, random = points(200, 0), points(20, 1), np.random.default_rng(2)
    second = random.standard_normal((7, 7)) * (GROUPS[:, None] != GROUPS[None, :]) * interacts
    truth = Weights(0.5, random.standard_normal(7), second + second.T)
    scale = evaluate(truth, features).std()
    drawn = predictor.draw_weights(features, GROUPS, evaluate(truth, features) / scale, random)
    assert np.mean((evaluate(drawn, others) - evaluate(truth, others) / scale) ** 2) < 1e-2


def test_equal_scores_have_equal_ranks() -> None:
    found = predictor.normal_scores([3.0, 1.0, 1.0, -1e9])
    assert found[1] == found[2] and found[0] == -found[3] and found[3] < found[1] < found[0]
    assert predictor.normal_scores([2.0, 2.0]).tolist() == [0.0, 0.0]


def test_features_are_choices_few_values_or_cosines_of_the_position_in_all_ranges() -> None:
    parameter = Parameter([CategoricalDistribution(("a", True, 1))], start=2)
    assert parameter.columns == slice(2, 5)
    assert parameter.features([1, "a", True]).tolist() == [[0, 0, 1], [1, 0, 0], [0, 1, 0]]
    few = Parameter([IntDistribution(0, 2), IntDistribution(0, 4)], start=0)
    assert few.features([4, 0]).tolist() == [[0, 0, 0, 0, 1], [1, 0, 0, 0, 0]]
    assert few.options(np.random.default_rng(0)).tolist() == np.eye(5).tolist()
    long = Parameter([FloatDistribution(1e-4, 1e-2, log=True), FloatDistribution(1e-3, 1.0, log=True)], start=0)
    expected = [1.0, math.cos(math.pi / 4), 0.0, math.cos(3 * math.pi / 4) / 3, -0.25]
    assert long.features([1e-3])[0].tolist() == pytest.approx(expected)
    found = predictor.candidates(FloatDistribution(1e-6, 1.0, log=True), np.random.default_rng(0))
    assert len(found) == 64 and found == sorted(found) and found[0] < 2e-6 and found[-1] > 0.5


def test_what_it_learns_from_is_bounded() -> None:
    outcomes = [Outcome(number, float(-abs(number - 3)), {}, {}) for number in range(20)]
    assert [each.number for each in predictor._learned_from(outcomes, 6)] == [2, 4, 3, 17, 18, 19]
    assert predictor._learned_from(outcomes, 20) == outcomes


LETTERS = tuple("abcdef")


def test_pairs_of_decisions_are_learned() -> None:
    """The value depends on whether two decisions are equal, and on neither of them alone."""

    def objective(trial: Any) -> float:
        one, two = (trial.suggest_categorical(name, LETTERS[:4]) for name in ("one", "two"))
        other = trial.suggest_categorical("other", LETTERS)
        return float(one != two) + 0.1 * LETTERS.index(other)

    study = optuna.create_study(sampler=PredictorSampler())
    study.optimize(objective, n_trials=60)
    late = [trial.value for trial in study.trials[30:]]
    # A random point is worth 1.
    assert sum(late) / len(late) < 0.5
    assert study.best_value == 0.0


def test_a_first_decision_is_judged_by_what_it_makes_possible() -> None:
    """A choice with one good continuation among bad ones, beside one whose continuations are all mediocre."""

    def objective(trial: Any) -> float:
        if trial.suggest_categorical("kind", ("rich", "safe")) == "safe":
            return 1.0 + 0.01 * trial.suggest_int("small", 0, 3)
        return 0.0 if trial.suggest_categorical("detail", LETTERS) == "d" else 2.0

    study = optuna.create_study(sampler=PredictorSampler())
    study.optimize(objective, n_trials=30)
    assert study.best_value == 0.0


def test_no_point_is_tried_twice_while_there_are_others_at_its_last_decision() -> None:
    study = optuna.create_study(sampler=PredictorSampler(num_startup_trials=2))
    for _ in range(12):
        trial = study.ask()
        study.tell(trial, LETTERS.index(trial.suggest_categorical("kind", LETTERS)))
    # The first two are random.
    assert {trial.params["kind"] for trial in study.trials[:8]} == set(LETTERS)


def test_values_are_random_until_enough_trials_have_values() -> None:
    studies = [optuna.create_study(sampler=PredictorSampler(num_startup_trials=each)) for each in (6, 50)]
    for study in studies:
        for number in range(20):
            trial = study.ask({"x": FloatDistribution(0.0, 1.0)})
            if number % 2:
                study.tell(trial, trial.params["x"])
            else:
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
    one, other = ([trial.params["x"] for trial in study.trials] for study in studies)
    # The sixth value comes with trial 11.
    assert one[:12] == other[:12]
    assert all(first != second for first, second in zip(one[12:], other[12:], strict=True))


RATE = {"rate": FloatDistribution(0.0, 1.0)}
BEGIN = datetime(2026, 1, 1)


def add(study: Any, state: str, value: float | None = None, *, ended: int = 0, last: float | None = None) -> None:
    trial = optuna.trial.create_trial(
        state=optuna.trial.TrialState[state],
        params={"rate": 0.1 * len(study.trials)},
        distributions=RATE,
        value=value,
        intermediate_values={} if last is None else {1: 99.0, 2: last},
    )
    trial.datetime_complete = BEGIN + timedelta(seconds=ended)
    study.add_trial(trial)


@pytest.mark.parametrize(("direction", "sign"), [("maximize", 1.0), ("minimize", -1.0)])
def test_more_is_better_in_both_directions(direction: str, sign: float) -> None:
    study = optuna.create_study(direction=direction)
    add(study, "COMPLETE", 2.0)
    add(study, "FAIL")
    add(study, "PRUNED")
    add(study, "PRUNED", last=float("nan"))
    add(study, "COMPLETE", float("inf"))
    history = read_history(study, 9, "evolution")
    assert [each.score for each in history.outcomes] == [sign * 2.0, *[-float("inf")] * 4]
    assert [each.score for each in history.scored] == [sign * 2.0]


def test_a_pruned_trial_is_no_better_than_the_median_of_those_before_it() -> None:
    study = optuna.create_study(direction="minimize")
    add(study, "PRUNED", last=0.1, ended=0)
    for ended, value in enumerate((1.0, 3.0, 2.0), start=1):
        add(study, "COMPLETE", value, ended=ended)
    add(study, "PRUNED", last=0.1, ended=4)
    add(study, "PRUNED", last=5.0, ended=5)
    add(study, "COMPLETE", 0.5, ended=6)
    scores = [each.score for each in read_history(study, 9, "evolution").outcomes]
    assert scores == [-0.1, -1.0, -3.0, -2.0, -2.0, -5.0, -0.5]


def test_what_is_known_when_a_trial_begins() -> None:
    study = optuna.create_study()
    for ended in (3, 1, 2, 1):
        add(study, "COMPLETE", 1.0, ended=ended)
    running = study.ask(RATE)
    study.ask(RATE)
    history = read_history(study, 5, "evolution")
    assert [outcome.number for outcome in history.outcomes] == [1, 3, 2, 0]
    assert len(history.tried) == 5 and frozenset(running.params.items()) in history.tried
