"""What a study may hold before its sweep begins: trials that the user has queued, or those of another sweep."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from mlotool.config.sweep_plan import Dimension
from mlotool.core.errors import ConfigError
from mlotool.sweep.driver import run_jobs
from mlotool.sweep.study import StudyPoints
from tests.sweep.plans import HereAndNow, known, make_plan, sweep_in

optuna = pytest.importorskip("optuna")

SIZE = Dimension("width", ("2", "4"))
Decide = Callable[[str, tuple[Any, ...]], Any]


def draw(words: Sequence[str], decide: Decide) -> dict[str, Any]:
    return {name: decide(name, ("a", "b", "c")) for name in ("first", "second")}


def search(folder: Path, *, is_resumed: bool = True, **settings: Any) -> HereAndNow:
    plan, record = make_plan(folder, SIZE, **{"sampler": "random", **settings}), known(folder, is_resumed=is_resumed)
    points = StudyPoints(plan, folder, record, draw)
    launcher = HereAndNow(lambda folder, spec: ("finished", 1.0))
    run_jobs(points, launcher, [{}], sweep_in(folder))
    return launcher


def study_of(folder: Path) -> Any:
    return optuna.load_study(study_name=None, storage=f"sqlite:///{folder / 'study.db'}")


def queue(study: Any, first: str, second: str) -> None:
    study.enqueue_trial({"width": "2", "decisions.first": first, "decisions.second": second})


@pytest.mark.parametrize("is_resumed", [False, True])
def test_it_is_the_next_job(tmp_path: Path, is_resumed: bool) -> None:
    if is_resumed:
        search(tmp_path, num_trials=2)
    else:
        optuna.create_study(
            storage=f"sqlite:///{tmp_path / 'study.db'}", study_name=tmp_path.name, direction="maximize"
        )
    tried = {tuple(each.params.values())[1:] for each in study_of(tmp_path).trials}
    chosen = next(pair for pair in [("c", "b"), ("b", "c"), ("c", "a")] if pair not in tried)
    queue(study_of(tmp_path), *chosen)
    number = len(study_of(tmp_path).trials) - 1
    assert search(tmp_path, num_trials=4, is_resumed=is_resumed).started[0] == str(number)
    assert tuple(study_of(tmp_path).trials[number].params.values()) == ("2", *chosen)


def test_brute_force_goes_on_after_one_that_is_known(tmp_path: Path) -> None:
    search(tmp_path, num_trials=2, sampler="brute_force")
    study_of(tmp_path).enqueue_trial(study_of(tmp_path).trials[0].params)
    assert len(search(tmp_path, num_trials=20, sampler="brute_force").started) == 2 * 9 - 2


def test_it_waits_where_no_more_jobs_are_asked_for(tmp_path: Path) -> None:
    search(tmp_path, num_trials=2)
    queue(study_of(tmp_path), "a", "b")
    assert search(tmp_path, num_trials=2).started == []
    assert study_of(tmp_path).trials[-1].state.name == "WAITING"


@pytest.mark.parametrize(("key", "value"), [("width", "3"), ("decisions.first", "d"), ("decisions.second", ["a"])])
def test_a_value_that_the_sweep_does_not_have_is_drawn_instead(tmp_path: Path, key: str, value: Any) -> None:
    search(tmp_path, num_trials=1)
    given = {"width": "4", "decisions.first": "c", "decisions.second": "c"}
    study_of(tmp_path).enqueue_trial({**given, key: value})
    with pytest.warns(UserWarning, match=rf"trial 1 was queued with {key}=.*, which this sweep does not have; the val"):
        search(tmp_path, num_trials=2)
    params = study_of(tmp_path).trials[1].params
    assert {name: params[name] for name in given.keys() - {key}} == {name: given[name] for name in given.keys() - {key}}
    assert params[key] != value


def test_two_sweeps_of_one_name_in_one_database(tmp_path: Path) -> None:
    """The second one would take the trials of the first for its own."""
    folders, storage = [tmp_path / name / "search" for name in ("first", "second")], f"sqlite:///{tmp_path / 'all.db'}"
    for each in folders:
        each.mkdir(parents=True)
    assert len(search(folders[0], storage=storage, num_trials=2, is_resumed=False).started) == 2
    expected = (
        r"sweep.storage: found a study 'search' with \d+ trials in sqlite:.*/all.db, while this sweep is a new one"
    )
    with pytest.raises(ConfigError, match=expected):
        search(folders[1], storage=storage, num_trials=2, is_resumed=False)
    assert len(search(folders[0], storage=storage, num_trials=3).started) == 1
