"""Who copies whom, by which settings a state was trained, and what may be searched while runs train."""

import random
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest

from mlotool.config.sweeps.population import Population, Rules, draw_population
from mlotool.config.sweeps.sweep_plan import Dimension, SweepPlan, read_sweep
from mlotool.core.errors import ConfigError
from mlotool.folders.sweep_folder import SweepFolder

RATE = Dimension("problems.net.optimizer.lr", low=1e-3, high=1.0, log=True)


def population(num_members: int = 4, mode: str = "max", **rules: float) -> Population:
    settings: dict[str, Any] = {"interval": 10, "fraction": 0.25, "resample": 0.0, "factor": 2.0, "seed": 0}
    settings |= {"mode": mode, **rules}
    return Population(Rules(**settings), [RATE], [{RATE.key: 0.1 * 2**-number} for number in range(num_members)])


@pytest.mark.parametrize(("mode", "worst", "best"), [("max", 2, 1), ("min", 1, 2)])
def test_the_worst_go_on_from_the_best_with_settings_nearby(mode: str, worst: int, best: int) -> None:
    members = population(mode=mode)
    [copy] = members.exchange(10, {0: 0.5, 1: 0.9, 2: 0.1, 3: 0.6})
    assert (copy.member, copy.source) == (worst, best)
    before = members.settings[best][RATE.key]
    assert copy.settings[RATE.key] in (before / 2, before * 2)
    # Asked again, as by a process that goes on, it is the same, whatever the values are.
    assert members.exchange(10, {0: 0.0}) == [copy]
    assert population(mode=mode).exchange(10, {0: 0.5, 1: 0.9, 2: 0.1, 3: 0.6}) == [copy]


def test_members_that_are_as_good_keep_their_states_and_at_most_half_copy() -> None:
    assert population().exchange(10, dict.fromkeys(range(4), 0.5)) == []
    assert population().exchange(10, {3: 0.5}) == []
    copies = population(5, fraction=0.5).exchange(10, {number: number / 5 for number in range(5)})
    assert {copy.member for copy in copies} == {0, 1} and {copy.source for copy in copies} <= {3, 4}


def test_the_schedule_of_a_state_is_that_of_those_whose_it_was(tmp_path: Path) -> None:
    """Member 0 copies 1 at 10; 2 copies 0 at 20, whose own later copy is none of what 2 was trained by."""
    members = population(3, fraction=0.3)
    [first] = members.exchange(10, {0: 0.1, 1: 0.9, 2: 0.5})
    [second] = members.exchange(20, {0: 0.9, 1: 0.5, 2: 0.1})
    [third] = members.exchange(30, {0: 0.1, 1: 0.5, 2: 0.9})
    assert [(copy.member, copy.source) for copy in (first, second, third)] == [(0, 1), (2, 0), (0, 2)]
    began, one, two = members.settings[1], first.settings, second.settings
    assert members.schedule(2) == [(0, began), (10, one), (20, two)]
    assert members.schedule(0) == [(0, began), (10, one), (20, two), (30, third.settings)]
    # The state at tick 30 is from before the exchange of that tick; that at 10 from before any.
    assert members.schedule(0, until=30) == [(0, began), (10, one)]
    assert members.schedule(2, until=20) == [(0, members.settings[2])]
    members.write(SweepFolder(tmp_path))
    assert Population.read(SweepFolder(tmp_path)) == members
    members.copies[0].settings["problems.net.module.width"] = 3.0
    with pytest.raises(ConfigError, match=r"found a copy of job 0 in population\.json that is not of this"):
        members.check()


@pytest.mark.parametrize("content", ["[]", '{"rules": {}}', "{"])
def test_what_nobody_of_ours_has_written_is_no_population(tmp_path: Path, content: str) -> None:
    (tmp_path / "population.json").write_text(content)
    assert Population.read(SweepFolder(tmp_path)) is None


def test_draws_are_in_range_and_around_the_recipes_own_value() -> None:
    generator = random.Random(0)
    step = Dimension("steps", low=2, high=8, step=2, whole=True)
    choices = Dimension("rate", ("0.1", "0.01", "1.0"))
    assert {step.drawn(generator) for _ in range(100)} == {2, 4, 6, 8}
    assert {step.moved(4, generator, 0.0, 1.1) for _ in range(50)} == {2, 6}
    assert {choices.moved(0.1, generator, 0.0, 1.1) for _ in range(50)} == {0.01, 1.0}
    assert {RATE.moved(0.9, generator, 0.0, 2.0) for _ in range(50)} == {0.45, 1.0}
    around = Dimension("x", low=0.0, high=10.0, around=5.0)
    drawn = [around.drawn(generator) for _ in range(4000)]
    # A normal of standard deviation 2.5, cut at twice that: 0.88 of it.
    assert fmean(drawn) == pytest.approx(5.0, abs=0.15) and pstdev(drawn) == pytest.approx(0.88 * 2.5, abs=0.1)


def plan(*words: str) -> SweepPlan:
    own = ["+recipe=plain", "sweep=pbt", "runner.max_ticks=1000", "sweep.num_trials=3"]
    return read_sweep([*own, *words])


LR = "problems.classifier.optimizer.lr=tag(log,interval(1e-3,1))"


def test_the_first_members_have_the_recipes_values_and_the_users() -> None:
    drawn = draw_population(plan(LR, "sweep.first=[{problems.classifier.optimizer.lr: 0.03}]"))
    first, second, third = (settings["problems.classifier.optimizer.lr"] for settings in drawn.settings)
    assert (first, second) == (0.1, 0.03) and 1e-3 < third < 1
    assert drawn.rules.interval == 100
    assert draw_population(plan(LR, "evaluate.splits.val=30")).rules.interval == 120


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["problems.classifier.stream.batch_size=10,20"], "expected one of problems.classifier.optimizer.lr, "),
        ([LR, "sweep.pbt.interval=150"], "sweep.pbt.interval: found 150; expected a multiple of the 100 ticks"),
        ([LR, "evaluate.splits.val=end"], "objective: found val/accuracy with sweep=pbt, which compares members while"),
        ([LR, "sweep.workers=2"], "sweep.workers: found 2 with sweep=pbt"),
        ([LR, "sweep.num_trials=1"], "sweep.num_trials: found 1 with sweep=pbt; expected at least 2"),
        (["problems.classifier.optimizer.lr=a,b"], "found a with sweep=pbt; expected numbers"),
        ([LR, "sweep.first=[{seed: 3}]"], r"sweep.first\[0\].seed: found a key that is not searched"),
        ([LR, "sweep.first=[{problems.classifier.optimizer.lr: 3}]"], "lr=3, which is not searched"),
        (["problems.classifier.optimizer.lr=tag(prior,interval(0.5,1))"], "the recipe's own value 0.1; expected an"),
    ],
)
def test_what_no_run_can_change_or_compare_is_told(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        draw_population(plan(*words))
