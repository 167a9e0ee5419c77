"""A search that is killed and gone on with draws what it would have drawn."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mlotool.config.sweep_plan import Dimension
from mlotool.sweep.driver import run_jobs
from mlotool.sweep.job_folder import JobSpec
from mlotool.sweep.study import StudyPoints
from tests.sweep.plans import HereAndNow, known, make_plan, sweep_in

optuna = pytest.importorskip("optuna")

DIMENSIONS = (
    Dimension("problems.classifier.optimizer.lr", low=1e-3, high=1.0, log=True),
    Dimension("problems.classifier.stream.batch_size", low=1, high=99, whole=True),
    Dimension("data", ("digits", "mnist")),
)
NUM_TRIALS = 6
Words = list[tuple[str, ...]]


class Killed(BaseException):
    pass


@pytest.fixture(autouse=True)
def _waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlotool.sweep.driver.SECONDS_BETWEEN_LOOKS", 0.0)


def search(folder: Path, kills: Iterator[int], **settings: Any) -> Words:
    """Search until the job of the next kill begins; return the words of all jobs."""
    trained: Words = []
    dies_at = next(kills, None)

    def job(folder: Path, spec: JobSpec) -> tuple[str, float]:
        if int(folder.name) == dies_at:
            raise Killed
        trained.append(spec.words)
        rate = float(next(word for word in spec.words if "lr=" in word).partition("=")[2])
        return "finished", -abs(rate - 0.1)

    points = StudyPoints(make_plan(folder, *DIMENSIONS, num_trials=NUM_TRIALS, **settings), folder, known(folder))
    try:
        run_jobs(points, HereAndNow(job), [{}], sweep_in(folder, known(folder)))
    except Killed:
        return [*trained, *search(folder, kills, **settings)]
    return trained


SAMPLERS: dict[str, dict[str, Any]] = {
    "random": {"sampler": "random"},
    "random, another seed": {"sampler": "random", "seed": 7},
    "tpe": {"sampler": "tpe", "sampler_options": {"n_startup_trials": 3}},
    "tpe, together": {"sampler": "tpe", "sampler_options": {"n_startup_trials": 2, "multivariate": True}},
    "tpe, in groups": {
        "sampler": "tpe",
        "sampler_options": {"n_startup_trials": 2, "multivariate": True, "group": True},
    },
    "nsga2": {"sampler": "nsga2", "sampler_options": {"population_size": 3}},
    "evolution": {"sampler": "evolution", "sampler_options": {"population_size": 3, "sample_size": 2}},
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_same_settings_as_a_search_that_was_not_killed(tmp_path: Path, name: str) -> None:
    settings = {"sampler": "tpe", "pruner": "none", **SAMPLERS[name]}
    for each in ("whole", "killed"):
        (tmp_path / each).mkdir()
    whole = search(tmp_path / "whole", iter(()), **settings)
    assert len(set(whole)) == NUM_TRIALS
    assert search(tmp_path / "killed", iter((0, 1, 4)), **settings) == whole


@pytest.mark.parametrize("sampler", ["random", "tpe"])
@pytest.mark.parametrize("name", [each.key for each in DIMENSIONS])
def test_a_trial_that_was_half_drawn_gets_the_values_that_it_would_have_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampler: str, name: str
) -> None:
    from optuna.storages._cached_storage import _CachedStorage

    write: Callable[..., Any] = _CachedStorage.set_trial_param

    def dying(self: Any, trial_id: int, key: str, *values: Any) -> None:
        if key == name:
            raise Killed
        write(self, trial_id, key, *values)

    for each in ("whole", "killed"):
        (tmp_path / each).mkdir()
    whole = search(tmp_path / "whole", iter(()), sampler=sampler)
    with monkeypatch.context() as patch:
        patch.setattr(_CachedStorage, "set_trial_param", dying)
        with pytest.raises(Killed):
            StudyPoints(
                make_plan(tmp_path / "killed", *DIMENSIONS, num_trials=NUM_TRIALS, sampler=sampler),
                tmp_path / "killed",
                known(tmp_path / "killed"),
            ).next()
    assert search(tmp_path / "killed", iter(()), sampler=sampler) == whole


def test_seeds_and_trials_have_draws_of_their_own(tmp_path: Path) -> None:
    drawn = []
    for seed in range(3):
        (tmp_path / str(seed)).mkdir()
        drawn += search(tmp_path / str(seed), iter(()), sampler="random", seed=seed)
    assert len(set(drawn)) == 3 * NUM_TRIALS
