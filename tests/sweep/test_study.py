"""An Optuna study as the points of a sweep; jobs run in this process."""

import json
import math
import resource
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlotool.config.schema import PRUNERS, SAMPLERS
from mlotool.config.sweeps.sweep_plan import Dimension
from mlotool.core.errors import ConfigError, WriteError
from mlotool.sweep.folder import JobSpec, read_job
from mlotool.sweep.study import StudyPoints, Watcher
from mlotool.sweep.study_options import make_pruner, make_sampler
from tests.sweep.plans import RATE, Killed, known, make_plan, rate, run, states, study_of, take_up, trials, words_of

optuna = pytest.importorskip("optuna")

SOLVER = Dimension("hypergradient", ("cg", "neumann"))
WIDTH = Dimension("width", ("2", "4", "6"), low=2, high=6, step=2, whole=True)


@pytest.mark.usefixtures("in_memory")
def test_every_trial_is_a_job_with_its_values(tmp_path: Path) -> None:
    points = take_up(tmp_path, RATE, SOLVER, WIDTH, num_trials=4)
    assert run(points, tmp_path, rate).started == ["0", "1", "2", "3"]
    assert (points.num_ended, points.total) == (4, 4)
    for trial in trials(tmp_path):
        words = words_of(read_job(tmp_path / str(trial.number)))
        assert float(words["lr"]) == trial.params["lr"] == trial.value
        assert words["hypergradient"] in SOLVER.choices
        assert words["width"] in WIDTH.choices
        assert 1e-3 <= trial.value <= 1e-1


def watched(*values: dict[int, float]) -> Any:
    """Return what reports the values of a job, by its number and then by tick, until it is to end."""

    def job(folder: Path, spec: JobSpec) -> tuple[str, float]:
        assert spec.study is not None
        watch, reported = Watcher(**spec.study), values[int(folder.name)]
        answers = [watch(tick, value) for tick, value in reported.items()]
        return "pruned" if any(answers) else "finished", [*reported.values()][-1]

    return job


NAN = math.nan
FLAT = {10: 1.0, 20: 1.0, 30: 1.0}, {10: 2.0, 20: 2.0, 30: 2.0}
PRUNED: dict[str, tuple[dict[str, Any], list[dict[int, float]], list[str]]] = {
    "not a number once, unasked": ({}, [*[{1: 0.9, 2: 0.9}] * 6, {1: NAN, 2: 0.95}], ["COMPLETE"] * 7),
    "a bad job at its next number": (
        {"pruner": "median", "pruner_options": {"n_startup_trials": 2}},
        [*FLAT, {20: NAN, 30: 0.5}],
        ["COMPLETE", "COMPLETE", "PRUNED"],
    ),
}


@pytest.mark.parametrize("name", PRUNED)
@pytest.mark.usefixtures("in_memory")
def test_what_jobs_report_ends_those_that_do_worse_where_that_is_asked_for(tmp_path: Path, name: str) -> None:
    settings, values, expected = PRUNED[name]
    run(take_up(tmp_path, RATE, num_trials=len(values), **settings), tmp_path, watched(*values))
    assert states(tmp_path) == expected
    numbers = [{tick: value for tick, value in each.items() if not math.isnan(value)} for each in values]
    assert [trial.intermediate_values for trial in trials(tmp_path)] == numbers


@pytest.mark.usefixtures("in_memory")
def test_jobs_without_a_number_count_and_say_why(tmp_path: Path) -> None:
    results = [("finished", NAN), ("failed", 0.0), None, ("finished", 1.0), ("finished", None), ("finished", 0.25)]
    run(take_up(tmp_path, RATE, num_trials=6), tmp_path, lambda folder, _: results[int(folder.name)])
    assert states(tmp_path) == ["FAIL", "FAIL", "FAIL", "COMPLETE", "FAIL", "COMPLETE"]
    assert "it was made to die" in json.loads((tmp_path / "2" / "summary.json").read_text())["error"]


@pytest.mark.parametrize(("options", "expected"), [({}, True), ({"constant_liar": False}, False)])
@pytest.mark.usefixtures("in_memory")
def test_draws_of_a_process_keep_apart(options: dict[str, Any], expected: bool, tmp_path: Path) -> None:
    points = take_up(tmp_path, RATE, fuse=4, sampler_options=options)
    assert points._study.sampler._make(0)._constant_liar is expected


@pytest.mark.usefixtures("in_memory")
def test_a_search_that_goes_on_has_the_same_groups(tmp_path: Path) -> None:
    def dies_in_the_fifth(folder: Path, spec: JobSpec) -> tuple[str, float]:
        if folder.name == "4":
            raise Killed
        return "pruned" if folder.name == "3" else "finished", 1.0

    with pytest.raises(Killed):
        run(take_up(tmp_path, RATE, num_trials=7, fuse=3), tmp_path, dies_in_the_fifth)
    before = trials(tmp_path)
    # It was drawn, and its process never began.
    study_of(tmp_path).ask({"lr": optuna.distributions.FloatDistribution(1e-3, 1e-1, log=True)})
    points = take_up(tmp_path, RATE, num_trials=7, fuse=3)
    assert points.num_ended == 4
    launcher = run(points, tmp_path, lambda *_: ("finished", 1.0))
    assert launcher.groups == [["3", "4", "5"], ["6"]]
    assert launcher.started == ["4", "5", "6"]
    assert [trial.params for trial in trials(tmp_path)[:6]] == [trial.params for trial in before]
    assert states(tmp_path) == [*["COMPLETE"] * 3, "PRUNED", *["COMPLETE"] * 3]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"sampler_options": {"n_startup_trails": 3}}, "Did you mean 'n_startup_trials'"),
    ({"sampler_options": {"seed": 3}}, "sampler_options.seed: found an option .* expected sweep.seed"),
    (
        {"sampler": "evolution", "sampler_options": {"population_size": 0}},
        "found 0; expected a whole number of at leas",
    ),
    ({"sampler": "reinforce", "sampler_options": {"learning_rate": math.inf}}, "learning_rate: found inf"),
    ({"pruner": "percentile"}, "'percentile' does not start"),
    ({"pruner": "median", "pruner_options": {"n_warmup": 3}}, "n_warmup_steps"),
    ({"storage": "sqlite:////no/such/folder/study.db"}, "sweep.storage: found"),
    ({"objective": None}, "objective: found null"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_what_optuna_does_not_take_is_told(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        take_up(tmp_path, RATE, **settings)
    assert not list(tmp_path.iterdir())


def test_all_samplers_and_pruners_start() -> None:
    needed: dict[str, dict[str, Any]] = {"percentile": {"percentile": 25.0}, "threshold": {"upper": 1.0}}
    for name, kind in PRUNERS.items():
        assert type(make_pruner(name, needed.get(name, {}))).__name__ == kind
    # Of CMA-ES the package is asked for when its sampler is made.
    for name in SAMPLERS.keys() - {"cmaes"}:
        assert type(make_sampler(name, {}, seed=3)).__name__ == SAMPLERS[name]


@pytest.mark.usefixtures("in_memory")
def test_what_is_no_search_or_another_one_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(tmp_path, RATE, num_trials=1)
    StudyPoints(plan, tmp_path, known(tmp_path))
    with pytest.raises(ConfigError, match=r"sweep\.params: found nothing to search"):
        take_up(tmp_path)
    with pytest.raises(ConfigError, match="varies the objective or its mode"):
        StudyPoints(replace(plan, mode=None), tmp_path, known(tmp_path))
    with pytest.raises(ConfigError, match=r"a study .* with other objectives: to maximize val/accuracy"):
        StudyPoints(replace(plan, mode="min"), tmp_path, known(tmp_path))
    (tmp_path / "groups.json").write_text('{"groups": [[0, 1]]}')
    with pytest.raises(ConfigError, match=r"resume: found job 0, which is not of this sweep, in .*groups\.json"):
        take_up(tmp_path, RATE)
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(ConfigError, match=r"sweep=optuna: the package optuna is not installed.*mlotool\[optuna\]"):
        take_up(tmp_path, RATE)


def test_a_study_on_a_full_disk_is_told_in_a_sentence(tmp_path: Path) -> None:
    points = take_up(tmp_path, RATE, num_trials=2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "study.db").stat().st_size // 2, hard))
    try:
        with pytest.raises(WriteError, match=r"sweep\.storage: the database sqlite:.* cannot store.*resume=auto"):
            points.next()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    # With space again it goes on.
    assert take_up(tmp_path, RATE, num_trials=2).next() is not None


CHOICES = '{"name": "CategoricalDistribution", "attributes": {"choices": ["${oc.env:HOME}", "{_target_: os.system}"]}}'
SPOILED = (
    f"UPDATE trial_params SET distribution_json = '{CHOICES}', param_value = 0",
    "UPDATE trial_params SET param_value = 1e9",
    "UPDATE trial_params SET distribution_json = '[[['",
    "UPDATE trials SET number = '../../x'",
)


def test_the_study_of_a_stranger_gives_no_words(tmp_path: Path) -> None:
    assert take_up(tmp_path, RATE, SOLVER).next() is not None
    begun = (tmp_path / "study.db").read_bytes()
    for statement in SPOILED:
        (tmp_path / "study.db").write_bytes(begun)
        with sqlite3.connect(tmp_path / "study.db") as connection:
            connection.execute(statement)
        connection.close()
        with pytest.raises(ConfigError, match=r"expected .*resume out for a new sweep"):
            take_up(tmp_path, RATE, SOLVER)
    (tmp_path / "study.db").write_bytes(begun)
    with pytest.raises(ConfigError, match="a pickle, which can run code"):
        take_up(tmp_path, RATE, SOLVER, sampler="cmaes")
    assert take_up(tmp_path, RATE, SOLVER).next() is not None
