"""An Optuna study as the points of a sweep; jobs run in this process."""

import json
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlotool.config.sweep_plan import Dimension
from mlotool.core.errors import ConfigError, WriteError
from mlotool.sweep.driver import run_jobs
from mlotool.sweep.job_folder import JobSpec, read_job
from mlotool.sweep.study import StudyPoints
from mlotool.sweep.watcher import Watcher
from tests.sweep.plans import HereAndNow, known, make_plan, sweep_in

optuna = pytest.importorskip("optuna")

RATE = Dimension("lr", low=1e-3, high=1e-1, log=True)
SOLVER = Dimension("hypergradient", ("cg", "neumann"))
WIDTH = Dimension("width", ("2", "4", "6"), low=2, high=6, step=2, whole=True)


def rate(spec: JobSpec) -> float:
    return float(dict(word.split("=") for word in spec.words)["lr"])


def run(points: StudyPoints, folder: Path, job: Callable[[Path, JobSpec], Any]) -> HereAndNow:
    launcher = HereAndNow(job)
    run_jobs(points, launcher, [{}], sweep_in(folder))
    return launcher


def trials(folder: Path) -> list[Any]:
    found: list[Any] = optuna.load_study(study_name=None, storage=f"sqlite:///{folder / 'study.db'}").trials
    return found


def test_every_trial_is_a_job_with_its_values(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, RATE, SOLVER, WIDTH, num_trials=4)
    points = StudyPoints(plan, tmp_path, known(tmp_path))
    assert run(points, tmp_path, lambda folder, spec: ("finished", rate(spec))).started == ["0", "1", "2", "3"]
    assert (points.num_ended, points.total) == (4, 4)
    for trial in trials(tmp_path):
        words = dict(word.split("=") for word in read_job(tmp_path / str(trial.number)).words)
        assert float(words["lr"]) == trial.params["lr"] == trial.value
        assert words["hypergradient"] in SOLVER.choices
        assert words["width"] in WIDTH.choices
        assert 1e-3 <= trial.value <= 1e-1


def test_the_same_seed_draws_the_same_points(tmp_path: Path) -> None:
    found = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        (tmp_path / name).mkdir()
        plan = make_plan(tmp_path / name, RATE, num_trials=3, seed=seed)
        run(
            StudyPoints(plan, tmp_path / name, known(tmp_path / name)),
            tmp_path / name,
            lambda folder, spec: ("finished", rate(spec)),
        )
        found.append([trial.params["lr"] for trial in trials(tmp_path / name)])
    assert found[0] == found[1]
    assert found[0] != found[2]


@pytest.mark.parametrize(
    "curves",
    [
        pytest.param([(0.50, 0.70), (0.51, 0.71), (0.30, 0.95)], id="one that begins slowly"),
        pytest.param([(0.9, 0.9)] * 6 + [(float("nan"), 0.95)], id="not a number once"),
    ],
)
def test_no_job_is_ended_by_what_others_reach_unless_that_is_asked_for(
    tmp_path: Path, curves: list[tuple[float, float]]
) -> None:
    def job(folder: Path, spec: JobSpec) -> tuple[str, float]:
        assert spec.study is not None
        watch, values = Watcher(**spec.study), curves[int(folder.name)]
        ends = [watch(tick, value) for tick, value in zip((100, 200), values, strict=True)]
        return "pruned" if any(ends) else "finished", values[1]

    # The first ones of them are over when the last begins.
    run(StudyPoints(make_plan(tmp_path, RATE, num_trials=len(curves)), tmp_path, known(tmp_path)), tmp_path, job)
    assert {trial.state.name for trial in trials(tmp_path)} == {"COMPLETE"}


def test_the_objective_is_reported_and_a_bad_job_is_pruned(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, RATE, num_trials=3, pruner="median", pruner_options={"n_startup_trials": 2})
    seen = []

    def job(folder: Path, spec: JobSpec) -> tuple[str, float]:
        # The third job does worse than the median of the others.
        value = {"0": 1.0, "1": 2.0, "2": 0.5}[folder.name]
        assert spec.study is not None
        watch = Watcher(**spec.study)
        for tick in (10, 20, 30):
            seen.append((folder.name, tick))
            if watch(tick, value * tick):
                return "pruned", value * tick
        return "finished", value * 30

    run(StudyPoints(plan, tmp_path, known(tmp_path)), tmp_path, job)
    found = trials(tmp_path)
    assert [trial.state.name for trial in found] == ["COMPLETE", "COMPLETE", "PRUNED"]
    assert found[0].intermediate_values == {10: 10.0, 20: 20.0, 30: 30.0}
    assert found[2].intermediate_values == {10: 5.0}
    assert seen[-1] == ("2", 10)


def test_failed_and_dead_jobs_count_and_say_why(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, RATE, num_trials=3)
    results = {"0": ("failed", 0.0), "1": None, "2": ("finished", 1.0)}
    run(StudyPoints(plan, tmp_path, known(tmp_path)), tmp_path, lambda folder, spec: results[folder.name])
    assert [trial.state.name for trial in trials(tmp_path)] == ["FAIL", "FAIL", "COMPLETE"]
    assert "it was made to die" in json.loads((tmp_path / "1" / "summary.json").read_text())["error"]


def test_a_sweep_that_died_is_gone_on_with_under_the_same_numbers(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, RATE, num_trials=5)

    def die_in_the_third(folder: Path, spec: JobSpec) -> tuple[str, float]:
        if folder.name == "2":
            (folder / "config.yaml").write_text("half-way")
            raise RuntimeError("the power went out")
        return "finished", rate(spec)

    with pytest.raises(RuntimeError):
        run(StudyPoints(plan, tmp_path, known(tmp_path)), tmp_path, die_in_the_third)
    before = trials(tmp_path)
    assert [trial.state.name for trial in before] == ["COMPLETE", "COMPLETE", "RUNNING"]
    # Its process was killed before Optuna drew its values.
    optuna.load_study(study_name=None, storage=f"sqlite:///{tmp_path / 'study.db'}").ask()

    points = StudyPoints(plan, tmp_path, known(tmp_path))
    assert points.num_ended == 2
    launcher = run(points, tmp_path, lambda folder, spec: ("finished", rate(spec)))
    assert launcher.started == ["2", "3", "4"]
    after = trials(tmp_path)
    assert [trial.state.name for trial in after] == ["COMPLETE"] * 5
    assert after[2].params == before[2].params
    assert not (tmp_path / "2" / "config.yaml").exists()
    drawn = [trial.params["lr"] for trial in after if trial.params]
    assert len(set(drawn)) == 5


def test_the_jobs_of_a_process_are_drawn_together(tmp_path: Path) -> None:
    """The last process has fewer, where their number is no multiple."""
    plan, announced = make_plan(tmp_path, RATE, SOLVER, num_trials=5, fuse=2), list[tuple[int, str]]()
    points, launcher = (
        StudyPoints(plan, tmp_path, known(tmp_path)),
        HereAndNow(lambda _, spec: ("finished", rate(spec))),
    )
    run_jobs(points, launcher, [{}], sweep_in(tmp_path, known(tmp_path), announced))
    assert launcher.groups == [["0", "1"], ["2", "3"], ["4"]]
    assert announced == [(number, "finished") for number in range(5)]
    assert [trial.value for trial in trials(tmp_path)] == [trial.params["lr"] for trial in trials(tmp_path)]
    assert points.next() is None


@pytest.mark.parametrize(
    ("fuse", "settings", "expected"),
    [(4, {}, True), (4, {"sampler_options": {"constant_liar": False}}, False)],
)
def test_draws_of_a_process_keep_apart(fuse: int, settings: dict[str, Any], expected: bool, tmp_path: Path) -> None:
    points = StudyPoints(make_plan(tmp_path, RATE, fuse=fuse, **settings), tmp_path, known(tmp_path))
    assert points._study.sampler._make(0)._constant_liar is expected


def test_a_search_that_goes_on_has_the_same_groups(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, RATE, num_trials=7, fuse=3)

    def dies_in_the_fifth(folder: Path, spec: JobSpec) -> tuple[str, float]:
        if folder.name == "4":
            raise KeyboardInterrupt
        return ("pruned" if folder.name == "3" else "finished"), rate(spec)

    points = StudyPoints(plan, tmp_path, known(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        run_jobs(points, HereAndNow(dies_in_the_fifth), [{}], sweep_in(tmp_path, known(tmp_path)))
    before = trials(tmp_path)
    # It was drawn, and its process never began.
    optuna.load_study(study_name=None, storage=f"sqlite:///{tmp_path / 'study.db'}").ask(
        {"lr": optuna.distributions.FloatDistribution(1e-3, 1e-1, log=True)}
    )
    points, launcher = StudyPoints(plan, tmp_path, known(tmp_path)), HereAndNow(lambda *_: ("finished", 1.0))
    assert points.num_ended == 4
    run_jobs(points, launcher, [{}], sweep_in(tmp_path, known(tmp_path)))
    assert launcher.groups == [["3", "4", "5"], ["6"]]
    assert launcher.started == ["4", "5", "6"]
    after = trials(tmp_path)
    assert [trial.params for trial in after[:6]] == [trial.params for trial in before]
    assert [trial.state.name for trial in after] == [*["COMPLETE"] * 3, "PRUNED", *["COMPLETE"] * 3]


def test_groups_with_jobs_that_a_study_has_not_are_refused(tmp_path: Path) -> None:
    (tmp_path / "groups.json").write_text('{"groups": [[0, 1]]}')
    with pytest.raises(ConfigError, match=r"resume: found job 0, which is none of this sweep's, in .*groups\.json"):
        StudyPoints(make_plan(tmp_path, RATE), tmp_path, known(tmp_path))


def test_a_job_that_ended_before_the_sweep_took_note_is_not_run_again(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, RATE, num_trials=2)
    points = StudyPoints(plan, tmp_path, known(tmp_path))
    point = points.next()
    assert point is not None
    (tmp_path / "0").mkdir()
    summary = {"status": "finished", "objective": {"key": "val/accuracy", "value": 0.5}}
    (tmp_path / "0" / "summary.json").write_text(json.dumps(summary))
    assert run(StudyPoints(plan, tmp_path, known(tmp_path)), tmp_path, lambda *_: ("finished", 0.1)).started == ["1"]
    assert [trial.value for trial in trials(tmp_path)] == [0.5, 0.1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sampler_options": {"n_startup_trails": 3}}, "Did you mean 'n_startup_trials'"),
        ({"sampler_options": {"seed": 3}}, "sampler_options.seed: found 3; expected the seed in a key of its own"),
        ({"pruner": "percentile"}, "'percentile' does not start"),
        ({"pruner": "median", "pruner_options": {"n_warmup": 3}}, "n_warmup_steps"),
        ({"storage": "sqlite:////no/such/folder/study.db"}, "sweep.storage: found"),
        ({"objective": None}, "objective: found null"),
    ],
)
def test_what_optuna_does_not_take_is_told(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StudyPoints(make_plan(tmp_path, RATE, **settings), tmp_path, known(tmp_path))


def test_nothing_to_search_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sweep\.params: found nothing to search"):
        StudyPoints(make_plan(tmp_path), tmp_path, known(tmp_path))


def test_a_missing_package_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(ConfigError, match=r"sweep=optuna: the package optuna is not installed.*mlotool\[optuna\]"):
        StudyPoints(make_plan(tmp_path, RATE), tmp_path, known(tmp_path))


def test_all_samplers_and_pruners_start(tmp_path: Path) -> None:
    from mlotool.config.schema import PRUNERS, SAMPLERS
    from mlotool.sweep.study_options import make_pruner, make_sampler

    needed: dict[str, dict[str, Any]] = {"percentile": {"percentile": 25.0}, "threshold": {"upper": 1.0}}
    for name in PRUNERS:
        assert type(make_pruner(name, needed.get(name, {}))).__name__ == PRUNERS[name]
    # Of CMA-ES the package is asked for when its sampler is made.
    for name in SAMPLERS.keys() - {"cmaes"}:
        assert type(make_sampler(name, {}, seed=3)).__name__ == SAMPLERS[name]
    assert hasattr(optuna.samplers, SAMPLERS["cmaes"])


def test_a_study_of_the_other_direction_is_not_gone_on_with(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, RATE, num_trials=1)
    StudyPoints(plan, tmp_path, known(tmp_path))
    with pytest.raises(ConfigError, match=r"a study .* that is to maximize val/accuracy; expected one that is to min"):
        StudyPoints(replace(plan, mode="min"), tmp_path, known(tmp_path))


def test_jobs_that_are_judged_in_different_ways_are_no_study(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="varies what it is judged by"):
        StudyPoints(replace(make_plan(tmp_path, RATE), mode=None), tmp_path, known(tmp_path))


def test_a_study_on_a_full_disk_is_told_in_a_sentence(tmp_path: Path) -> None:
    points = StudyPoints(make_plan(tmp_path, RATE, num_trials=10_000), tmp_path, known(tmp_path))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "study.db").stat().st_size, hard))
    try:
        with pytest.raises(WriteError, match=r"sweep\.storage: the database sqlite:.* does not take.*resume=auto"):
            for _ in range(10_000):
                points.next()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    # With space again it goes on.
    assert StudyPoints(make_plan(tmp_path, RATE, num_trials=10_000), tmp_path, known(tmp_path)).next() is not None
