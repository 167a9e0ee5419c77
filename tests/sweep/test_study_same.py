"""Points that a sampler draws again, which are not trained; trials that the user has queued, or of another sweep."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mlotool.config.sweeps.sweep_plan import Dimension
from mlotool.core.errors import ConfigError
from mlotool.sweep.folder import JobSpec, read_job
from mlotool.sweep.study import StudyPoints, Watcher
from tests.sweep.plans import Decide, known, make_plan, run, states, study_of, take_up, trials

optuna = pytest.importorskip("optuna")
pytestmark = pytest.mark.usefixtures("in_memory")

SEED = Dimension("seed", ("0", "1"))
SIZE = Dimension("width", ("2", "4", "6"))
MOST_IN_A_ROW = 15
"""Draws of known points: enough for spaces of four points."""


@pytest.fixture(autouse=True)
def few_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlotool.sweep.study.MOST_IN_A_ROW", MOST_IN_A_ROW)


def draw(words: Sequence[str], decide: Decide) -> dict[str, Any]:
    return {name: decide(name, ("a", "b")) for name in ("first", "second")}


def score(folder: Path, spec: JobSpec) -> tuple[str, float]:
    return "finished", float(sum(map(ord, "".join(word for word in spec.words if "seed" not in word))))


def four(folder: Path, **settings: Any) -> StudyPoints:
    """Return a search of four models."""
    return take_up(folder, **{"draw": draw, "num_trials": 4, "sampler": "random", **settings})


def point(trial: Any) -> tuple[Any, ...]:
    return tuple(sorted(trial.params.items()))


def jobs(folder: Path) -> list[int]:
    return sorted(int(each.name) for each in folder.iterdir() if each.name.isdigit())


@pytest.mark.parametrize("settings", [{}, {"sampler": "evolution"}, {"sampler": "tpe", "fuse": 4}], ids=str)
@pytest.mark.parametrize("num_workers", [1, 2])
def test_each_model_is_trained_once(tmp_path: Path, settings: dict[str, Any], num_workers: int) -> None:
    points = four(tmp_path, **settings)
    started = run(points, tmp_path, score, num_workers=num_workers).started
    assert len(started) == len({read_job(tmp_path / name).words for name in started}) == 4
    assert (points.total, points.num_ended, points.ending) == (4, 4, "")
    found = trials(tmp_path)
    values = {point(each): each.value for each in found if str(each.number) in started}
    # All that the sampler sees is as if each had been trained.
    assert all((each.state.name, each.value) == ("COMPLETE", values[point(each)]) for each in found)
    others = [each for each in found if str(each.number) not in started]
    assert len(others) == points.num_same == len(found) - 4
    assert all(point(found[each.user_attrs["same_as_trial"]]) == point(each) for each in others)
    assert jobs(tmp_path) == sorted(map(int, started))


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_search_ends_where_there_is_nothing_else(tmp_path: Path, num_workers: int) -> None:
    points = four(tmp_path, num_trials=10, fuse=2)
    assert len(run(points, tmp_path, score, num_workers=num_workers).started) == 4
    assert (points.total, points.num_ended) == (4, 4)
    assert points.ending.startswith(f"the search ends with 4 of 10 jobs: the last {MOST_IN_A_ROW} draws were setti")
    assert points.num_same >= MOST_IN_A_ROW
    assert {*states(tmp_path)} == {"COMPLETE"}
    again = four(tmp_path, num_trials=10, fuse=2)
    assert (again.num_ended, again.num_same) == (4, points.num_same)
    assert run(again, tmp_path, score).started == []
    # Not with jobs that were interrupted, which go on; and one that failed is tried again.
    folder = tmp_path / "interrupted"
    points = four(folder, num_trials=10)
    assert len(run(points, folder, lambda *_: ("interrupted", 0.0)).started) == 4
    assert points.num_ended == 0
    assert f"the last {MOST_IN_A_ROW} draws were settings that were tried before, of which 4 jobs" in points.ending
    assert len(run(four(folder, num_trials=10), folder, score).started) == 4
    points = four(tmp_path / "failed", num_trials=10)
    assert len(run(points, tmp_path / "failed", lambda *_: ("failed", 0.0)).started) == 10


def test_a_pruned_one_is_pruned_again(tmp_path: Path) -> None:
    def job(folder: Path, spec: JobSpec) -> tuple[str, float]:
        assert spec.study is not None
        for tick in (10, 20):
            Watcher(**spec.study)(tick, float(tick))
        return ("pruned" if "decisions.first=a" in "".join(spec.words) else "finished"), 20.0

    run(four(tmp_path, num_trials=10, pruner="none"), tmp_path, job)
    found = trials(tmp_path)
    assert all(each.state.name == ("PRUNED" if each.params["decisions.first"] == "a" else "COMPLETE") for each in found)
    assert all(each.value == 20.0 for each in found)
    copies = [each for each in found if "same_as_trial" in each.user_attrs]
    assert copies
    for each in copies:
        # Pruners look at what completed trials have reported; samplers at the last value of those that were pruned.
        assert each.intermediate_values == ({20: 20.0} if each.state.name == "PRUNED" else {})


@pytest.mark.parametrize("value", [float("nan"), None])
@pytest.mark.parametrize("repeats", [1, 2])
def test_one_that_diverged_would_diverge_again(tmp_path: Path, value: Any, repeats: int) -> None:
    points = four(tmp_path, num_trials=3, repeats=repeats)
    assert len(run(points, tmp_path, lambda folder, spec: ("finished", value)).started) == 3 * repeats
    again = four(tmp_path, num_trials=10, repeats=repeats)
    assert len(run(again, tmp_path, lambda folder, spec: ("finished", value)).started) == repeats
    assert {*states(tmp_path)} == {"FAIL"}
    assert again.total == 4 * repeats


def test_a_spoiled_study(tmp_path: Path) -> None:
    run(four(tmp_path, num_trials=2), tmp_path, score)
    study_of(tmp_path).ask().set_user_attr("same_as_trial", 7)
    with pytest.raises(ValueError, match="has the point of trial"):
        four(tmp_path, num_trials=2)


def three(words: Sequence[str], decide: Decide) -> dict[str, Any]:
    return {name: decide(name, ("a", "b", "c")) for name in ("first", "second")}


def queued(folder: Path, **settings: Any) -> list[str]:
    """Search among nine models; return the jobs."""
    return run(
        take_up(folder, SIZE, **{"draw": three, "sampler": "random", **settings}), folder, lambda *_: ("finished", 1.0)
    ).started


@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_trial_that_was_queued_is_the_next_job(tmp_path: Path, is_resumed: bool) -> None:
    queued(tmp_path, num_trials=2 if is_resumed else 0)
    tried = {tuple(each.params.values())[1:] for each in trials(tmp_path)}
    chosen = next(pair for pair in [("c", "b"), ("b", "c"), ("c", "a")] if pair not in tried)
    values = dict(zip(("width", "decisions.first", "decisions.second"), ("2", *chosen), strict=True))
    study_of(tmp_path).enqueue_trial(values)
    number = len(trials(tmp_path)) - 1
    # It waits where no more jobs are asked for.
    assert queued(tmp_path, num_trials=len(jobs(tmp_path))) == [] and states(tmp_path)[-1] == "WAITING"
    assert queued(tmp_path, num_trials=4)[0] == str(number)
    assert trials(tmp_path)[number].params == values


@pytest.mark.parametrize(("key", "value"), [("width", "3"), ("decisions.second", ["a"])])
def test_a_value_that_the_sweep_does_not_have_is_drawn_instead(tmp_path: Path, key: str, value: Any) -> None:
    queued(tmp_path, num_trials=1)
    given = {"width": "4", "decisions.first": "c", "decisions.second": "c"}
    study_of(tmp_path).enqueue_trial({**given, key: value})
    with pytest.warns(UserWarning, match=rf"trial 1 was queued with {key}=.*, which this sweep does not have; the val"):
        queued(tmp_path, num_trials=2)
    params = trials(tmp_path)[1].params
    assert {name: params[name] for name in given.keys() - {key}} == {name: given[name] for name in given.keys() - {key}}
    assert params[key] != value


def test_two_sweeps_of_one_name_in_one_database(tmp_path: Path) -> None:
    """The second one would take the trials of the first for its own."""
    folders, storage = [tmp_path / name / "search" for name in ("first", "second")], f"sqlite:///{tmp_path / 'all.db'}"
    for folder in folders:
        folder.mkdir(parents=True)
    assert len(queued(folders[0], storage=storage, num_trials=2)) == 2
    expected = r"sweep.storage: found a study 'search' with \d+ trials in sqlite:.*/all.db; expected no study"
    with pytest.raises(ConfigError, match=expected):
        StudyPoints(make_plan(folders[1], SIZE, storage=storage), folders[1], known(folders[1], is_resumed=False))
    assert len(queued(folders[0], storage=storage, num_trials=3)) == 1
