"""What a search tries first, around what it draws then, and from which tick on it ends trials."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from mlotool.config.sweeps.sweep_plan import Dimension, SweepPlan
from mlotool.sweep.folder import JobSpec, read_job
from mlotool.sweep.study import StudyPoints, Watcher
from mlotool.sweep.study_options import pruner_options
from tests.sweep.plans import known, make_plan, rate, run, trials, words_of

pytest.importorskip("optuna")

SOLVER = Dimension("solver", ("cg", "neumann"))
RATE = Dimension("lr", low=1e-3, high=1e-1, log=True)
RECIPE = {"lr": 0.02, "solver": "neumann", "evaluate": {"splits": {"val": 100, "test": "end"}}}


def plan(folder: Path, *dimensions: Dimension, **settings: Any) -> SweepPlan:
    own = make_plan(folder, *dimensions, method="optuna", **settings)
    return replace(own, config=OmegaConf.create(RECIPE), last_tick=1000)


def searched(folder: Path, *dimensions: Dimension, draw: Any = None, **settings: Any) -> list[dict[str, str]]:
    """Run a search; return the overrides of its jobs."""
    own = plan(folder, *dimensions, **settings)
    run(StudyPoints(own, folder, known(folder, is_resumed=False), draw), folder, rate)
    return [words_of(read_job(folder / str(number))) for number in range(own.num_jobs)]


@pytest.mark.usefixtures("in_memory")
def test_the_recipes_own_values_come_first_and_then_the_users(tmp_path: Path) -> None:
    jobs = searched(tmp_path, RATE, SOLVER, num_trials=4, first=[{"lr": 0.1, "solver": "cg"}, {"solver": "cg"}])
    assert [(float(job["lr"]), job["solver"]) for job in jobs[:2]] == [(0.02, "neumann"), (0.1, "cg")]
    assert jobs[2]["solver"] == "cg" and all(1e-3 <= float(job["lr"]) <= 1e-1 for job in jobs)


@pytest.mark.usefixtures("in_memory")
def test_draws_are_those_of_before_where_the_recipe_does_not_come_first(tmp_path: Path) -> None:
    """A trial's draw is of its number: the others are the same with the recipe's trial before them."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    first = searched(tmp_path / "a", RATE, SOLVER, num_trials=4)
    without = searched(tmp_path / "b", RATE, SOLVER, num_trials=4, recipe_first=False)
    assert first[1:] == without[1:] and first[0] != without[0]
    # What is out of the range of the search is no part of its first trial.
    (tmp_path / "c").mkdir()
    [job] = searched(tmp_path / "c", replace(RATE, low=0.05), SOLVER, num_trials=1)
    assert float(job["lr"]) >= 0.05 and job["solver"] == "neumann"


@pytest.mark.parametrize("recipe_first", [True, False])
@pytest.mark.usefixtures("in_memory")
def test_the_trial_of_the_recipes_own_values_is_never_pruned(tmp_path: Path, recipe_first: bool) -> None:
    answers = []

    def job(folder: Path, spec: JobSpec) -> tuple[str, float]:
        if folder.name == "0":
            assert spec.study is not None
            # The other trial of the group is better at the tick of the comparison.
            for trial, value in ((1, 0.9), (0, 0.1)):
                answers.append(Watcher(**{**spec.study, "trial": trial})(10, value))
        return "finished", 0.5

    settings = {"num_trials": 2, "fuse": 2, "recipe_first": recipe_first, "pruner": "successive_halving"}
    own = plan(tmp_path, RATE, pruner_options={"min_resource": 10, "reduction_factor": 2}, **settings)
    run(StudyPoints(own, tmp_path, known(tmp_path, is_resumed=False)), tmp_path, job)
    assert answers == [False, not recipe_first]


@pytest.mark.usefixtures("in_memory")
def test_the_first_model_of_a_space_has_the_first_candidates(tmp_path: Path) -> None:
    def draw(words: Any, decide: Any) -> dict[str, Any]:
        return {name: decide(name, names) for name, names in (("width", (8, 16, 32)), ("kind", ("a", "b", "c")))}

    jobs = searched(tmp_path, RATE, draw=draw, num_trials=2)
    assert (jobs[0]["decisions.width"], jobs[0]["decisions.kind"], jobs[0]["lr"]) == ("8", "a", "0.02")


@pytest.mark.usefixtures("in_memory")
def test_the_random_draws_of_a_prior_are_those_of_the_plan(tmp_path: Path) -> None:
    around = replace(RATE, low=1e-6, high=10.0, around=0.02)
    searched(tmp_path, around, num_trials=14, recipe_first=False)
    drawn = [trial for trial in trials(tmp_path) if "fixed_params" in trial.system_attrs]
    # TPE draws ten at random: those are the queued ones.
    assert len(drawn) == 10
    places = [around._place(trial.params["lr"]) for trial in drawn]
    middle = around._place(0.02)
    # A normal of standard deviation 1/4: of ten, more than six lie within 0.3 (one in a thousand times they do not).
    assert sum(abs(place - middle) < 0.3 for place in places) >= 6


def test_pruners_wait_for_a_part_of_the_run_up_to_the_next_evaluation(tmp_path: Path) -> None:
    def options(name: str, **given: Any) -> dict[str, Any]:
        return pruner_options(plan(tmp_path, RATE, pruner=name, pruner_options=given))

    assert options("median") == {"n_warmup_steps": 400}
    assert options("median", n_warmup_steps=0, n_startup_trials=2) == {"n_warmup_steps": 0, "n_startup_trials": 2}
    assert options("successive_halving") == {"reduction_factor": 3, "min_resource": 200}
    assert options("successive_halving", reduction_factor=2) == {"reduction_factor": 2, "min_resource": 300}
    assert options("none") == {}
    assert pruner_options(make_plan(tmp_path, RATE, pruner="median")) == {}
