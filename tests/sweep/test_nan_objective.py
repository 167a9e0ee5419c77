"""To a pruner NaN is no value; to a study a trial that ends with NaN is one that has none."""

import math
from pathlib import Path
from typing import Any

import pytest

from mlotool.sweep.job_folder import JobSpec
from mlotool.sweep.study import StudyPoints
from mlotool.sweep.watcher import Watcher
from tests.sweep.plans import known, make_plan
from tests.sweep.test_study import RATE, run, trials

pytest.importorskip("optuna")
PRUNERS: dict[str, dict[str, Any]] = {
    "median": {"n_startup_trials": 1},
    "successive_halving": {"min_resource": 1, "reduction_factor": 2},
    "hyperband": {"min_resource": 1, "max_resource": 4, "reduction_factor": 2},
    "threshold": {"lower": 0.0},
}


@pytest.mark.parametrize("pruner", PRUNERS)
def test_one_nan_ends_no_job(tmp_path: Path, pruner: str) -> None:
    plan = make_plan(tmp_path, RATE, num_trials=3, pruner=pruner, pruner_options=PRUNERS[pruner])
    answers = []

    def job(folder: Path, spec: JobSpec) -> tuple[str, float]:
        assert spec.study is not None
        watch = Watcher(**spec.study)
        # Each job is better than the one before.
        for tick, value in enumerate((math.nan, 1.0, math.nan, 2.0), 1):
            answers.append(watch(tick, (1 + int(folder.name)) * value))
        return "finished", 1.0

    run(StudyPoints(plan, tmp_path, known(tmp_path)), tmp_path, job)
    assert answers == [False] * 12
    assert [sorted(trial.intermediate_values) for trial in trials(tmp_path)] == [[2, 4]] * 3


def test_a_worse_job_is_pruned_at_its_next_number(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, RATE, num_trials=3, pruner="median", pruner_options={"n_startup_trials": 2})

    def job(folder: Path, spec: JobSpec) -> tuple[str, float]:
        assert spec.study is not None
        watch, value = Watcher(**spec.study), {"0": 1.0, "1": 2.0, "2": 0.5}[folder.name]
        for tick, factor in ((10, 1.0), (20, math.nan if folder.name == "2" else 1.0), (30, 1.0)):
            if tick > 10 and watch(tick, factor * value):
                return "pruned", value
        return "finished", value

    run(StudyPoints(plan, tmp_path, known(tmp_path)), tmp_path, job)
    assert [trial.state.name for trial in trials(tmp_path)] == ["COMPLETE", "COMPLETE", "PRUNED"]
    assert trials(tmp_path)[2].intermediate_values == {30: 0.5}


@pytest.mark.parametrize("sampler", ["tpe", "random", "evolution"])
def test_a_study_goes_on_after_a_trial_without_a_number(tmp_path: Path, sampler: str) -> None:
    plan = make_plan(tmp_path, RATE, num_trials=5, sampler=sampler)
    found = {"0": math.nan, "1": 0.5, "2": math.nan}
    run(
        StudyPoints(plan, tmp_path, known(tmp_path)),
        tmp_path,
        lambda folder, spec: ("finished", found.get(folder.name, 0.25)),
    )
    states = [trial.state.name for trial in trials(tmp_path)]
    assert states == ["FAIL", "COMPLETE", "FAIL", "COMPLETE", "COMPLETE"]
