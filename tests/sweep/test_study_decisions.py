"""Decisions of model spaces in a study: asked one by one, told as infeasible, repeated, and the same after a kill."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from mlotool.config.sweeps.sweep_plan import Dimension
from mlotool.core.errors import ConfigError, InfeasibleModelError, RunError
from mlotool.sweep.folder import JobSpec, read_job, read_outcome
from mlotool.sweep.study import words_of as words_of_trial
from tests.sweep.plans import RATE, Decide, Killed, run, states, study_of, take_up, trials, words_of

optuna = pytest.importorskip("optuna")
pytestmark = pytest.mark.usefixtures("in_memory")

SECOND = {"second_objective": "classifier/num_parameters", "second_objective_mode": "min"}


def draw(words: Sequence[str], decide: Decide) -> dict[str, Any]:
    """Ask for what only some models have, for whole numbers, and for a range that depends on them."""
    decisions = {"kind": decide("kind", ("a", "b"))}
    if decisions["kind"] == "b":
        decisions["depth"] = decide("depth", (1, 2, 3))
        decisions["source"] = decide("source", tuple(range(decisions["depth"] + 1)))
        decisions["width"] = decide("width", (8, 32))
    return decisions


def few(words: Sequence[str], decide: Decide) -> dict[str, Any]:
    """Ask for a; or for b with one of three depths. A width that the recipe has is asked for by b alone."""
    kind = decide("kind", ("a", "b"))
    return {"kind": kind, "width": None} if kind == "a" else {"kind": kind, "depth": decide("depth", (1, 2, 3))}


def score(folder: Path, spec: JobSpec) -> tuple[str, float]:
    values = words_of(spec)
    return "finished", float(values.get("decisions.depth", 0)) + float(values.get("seed", 0))


@pytest.mark.parametrize("sampler", ["tpe", "evolution", "reinforce", "predictor", "brute_force"])
def test_a_job_has_the_decisions_of_its_trial(tmp_path: Path, sampler: str) -> None:
    started = run(take_up(tmp_path, draw=draw, num_trials=4, sampler=sampler), tmp_path, score).started
    assert len(started) == 4
    for trial in (each for each in trials(tmp_path) if str(each.number) in started):
        values = words_of(read_job(tmp_path / str(trial.number)))
        decided = {key: value for key, value in values.items() if key.startswith("decisions.")}
        assert decided == {key: str(value) for key, value in trial.params.items()}
        assert ("decisions.depth" in decided) == (decided["decisions.kind"] == "b")


@pytest.mark.parametrize("fuse", [1, 8])
def test_brute_force_ends_where_all_have_been_tried(tmp_path: Path, fuse: int) -> None:
    settings: dict[str, Any] = {"draw": few, "num_trials": 50, "sampler": "brute_force", "fuse": fuse}
    points = take_up(tmp_path, **settings)
    # a; b with three depths.
    assert len(run(points, tmp_path, score).started) == points.num_ended == points.total == 1 + 3
    found = [trial for trial in trials(tmp_path) if (tmp_path / str(trial.number)).is_dir()]
    assert len(found) == len({tuple(sorted(trial.params.items())) for trial in found}) == 4
    again = take_up(tmp_path, **settings)
    assert (again.num_ended, again.next()) == (4, None)
    # A job is without what its models do not ask for.
    words = {trial.params["decisions.kind"]: read_job(tmp_path / str(trial.number)).words for trial in found}
    assert "~decisions.width" in words["a"] and not any(word.startswith("~") for word in words["b"])


def test_what_makes_no_model_is_told_and_not_trained(tmp_path: Path) -> None:
    def refuse_a(words: Sequence[str], decide: Decide) -> dict[str, Any]:
        decisions = draw(words, decide)
        if decisions["kind"] == "a":
            raise InfeasibleModelError("node 'x' does not fit")
        return decisions

    settings: dict[str, Any] = {"draw": refuse_a, "num_trials": 8, "sampler": "random", "fuse": 4}
    points, announced = take_up(tmp_path, RATE, **settings), list[tuple[int, str]]()
    launcher = run(points, tmp_path, score, announced=announced)
    kinds = {trial.number: trial.params["decisions.kind"] for trial in trials(tmp_path)}
    refused = [number for number, kind in kinds.items() if kind == "a"]
    assert refused
    assert launcher.started == [str(number) for number, kind in kinds.items() if kind == "b"]
    assert sorted(announced) == [(number, "infeasible" if number in refused else "finished") for number in range(8)]
    for number in refused:
        assert trials(tmp_path)[number].state.name == "FAIL"
        assert read_outcome(tmp_path / str(number)).error == "node 'x' does not fit"
    assert points.num_ended == take_up(tmp_path, RATE, **settings).num_ended == 8


def test_brute_force_ends_where_the_last_model_is_infeasible(tmp_path: Path) -> None:
    def one_fits(words: Sequence[str], decide: Decide) -> dict[str, Any]:
        if decide("kind", ("x", "y", "z")) != "x":
            raise InfeasibleModelError("no model")
        return {}

    for seed in range(4):
        folder = tmp_path / str(seed)
        points = take_up(folder, draw=one_fits, num_trials=10, sampler="brute_force", seed=seed)
        run(points, folder, score)
        assert points.total == points.num_ended == 3
        assert sorted(states(folder)) == ["COMPLETE", "FAIL", "FAIL"]


def test_repetitions_have_seeds_and_a_mean(tmp_path: Path) -> None:
    points = take_up(tmp_path, draw=draw, num_trials=3, repeats=3, seed=2)
    assert run(points, tmp_path, score).started == [str(number) for number in range(9)]
    for trial in trials(tmp_path):
        specs = [read_job(tmp_path / str(3 * trial.number + copy)) for copy in range(3)]
        assert [words_of(spec)["seed"] for spec in specs] == ["0", "1", "2"]
        assert len({tuple(word for word in spec.words if "seed" not in word) for spec in specs}) == 1
        assert all(spec.study is None for spec in specs)
        assert trial.value == trial.params.get("decisions.depth", 0) + 1
    assert (points.num_ended, points.total) == (9, 9)
    with pytest.raises(ConfigError, match=r"sweep.repeats: found 2 beside a seed that is searched; expected one"):
        take_up(tmp_path, Dimension("seed", ("0", "1")), draw=draw, repeats=2)


def test_repetitions_go_on_after_a_kill(tmp_path: Path) -> None:
    def die(folder: Path, spec: JobSpec) -> tuple[str, float]:
        if folder.name == "4":
            raise Killed
        return score(folder, spec)

    settings: dict[str, Any] = {"draw": draw, "num_trials": 3, "repeats": 3, "sampler": "evolution"}
    with pytest.raises(Killed):
        run(take_up(tmp_path, RATE, **settings), tmp_path, die)
    points = take_up(tmp_path, RATE, **settings)
    assert points.num_ended == 4
    assert run(points, tmp_path, score).started == ["4", "5", "6", "7", "8"]
    run(take_up(tmp_path / "other", RATE, **settings), tmp_path / "other", score)
    found = [[(trial.params, trial.value) for trial in trials(folder)] for folder in (tmp_path, tmp_path / "other")]
    assert found[0] == found[1]


def test_two_objectives(tmp_path: Path) -> None:
    def job(folder: Path, spec: JobSpec) -> tuple[str, float, dict[str, Any]]:
        depth = int(words_of(spec).get("decisions.depth", 0))
        return "finished", float(depth), {"num_parameters": {"classifier": 100 * depth}}

    run(take_up(tmp_path, draw=draw, num_trials=6, sampler="nsga2", **SECOND), tmp_path, job)
    assert all(trial.values == [trial.values[1] / 100, trial.values[1]] for trial in trials(tmp_path))
    assert [each.name for each in study_of(tmp_path).directions] == ["MAXIMIZE", "MINIMIZE"]
    misspelt = {**SECOND, "second_objective": "classifier/num_paramters", "sampler": "nsga2"}
    with pytest.raises(RunError, match=r"which .* has not logged; .* Did you mean 'classifier/num_parameters'"):
        run(take_up(tmp_path / "other", draw=draw, num_trials=3, **misspelt), tmp_path / "other", job)


def test_a_search_goes_on_after_candidates_that_changed_are_corrected(tmp_path: Path) -> None:
    is_corrected = False

    def depends(words: Sequence[str], decide: Decide) -> dict[str, Any]:
        depth = decide("depth", (1, 2, 4, 8))
        name = f"extra_{depth}" if is_corrected else "extra"
        return {"depth": depth, name: decide(name, ("a", f"b{depth}"))}

    settings: dict[str, Any] = {"draw": depends, "num_trials": 8, "sampler": "random"}
    expected = r"decisions.extra: found the candidates a, b\d, which differ from those in an earlier trial.*resume=auto"
    with pytest.raises(RunError, match=expected):
        run(take_up(tmp_path, **settings), tmp_path, score)
    before = {trial.number: trial.value for trial in trials(tmp_path) if trial.state.name == "COMPLETE"}
    assert before
    is_corrected = True
    points = take_up(tmp_path, **settings)
    launcher = run(points, tmp_path, score)
    assert points.num_ended == points.total
    assert not {str(number) for number in before} & set(launcher.started)
    assert all(trials(tmp_path)[number].value == value for number, value in before.items())


@pytest.mark.parametrize("value", ["${seed}", "a=b", 1.5, "A"])
def test_a_spoiled_study_has_no_words(tmp_path: Path, value: Any) -> None:
    run(take_up(tmp_path, draw=draw, num_trials=3), tmp_path, lambda folder, spec: None)
    study_of(tmp_path).add_trial(
        optuna.trial.create_trial(
            state=optuna.trial.TrialState.RUNNING,
            params={"decisions.other": value},
            distributions={"decisions.other": optuna.distributions.CategoricalDistribution([value, "b"])},
            user_attrs={"drawn": True},
        )
    )
    with pytest.raises(ValueError, match="its trial 3"):
        take_up(tmp_path, draw=draw, num_trials=3)
    # Nor does it take any out.
    folder = tmp_path / "few"
    take_up(folder, draw=few, num_trials=4).next()
    study_of(folder)._storage.set_trial_user_attr(trials(folder)[0]._trial_id, "unasked", ["width=1"])
    with pytest.raises(ValueError, match="its trial 0"):
        take_up(folder, draw=few, num_trials=4)


@pytest.mark.parametrize("value", ["null", "true", "nan", "1e5", "007", "3x3", 7])
def test_words_are_read_as_the_values_that_they_are_made_of(value: Any) -> None:
    distributions = {"decisions.kind": optuna.distributions.CategoricalDistribution([value, "other"])}
    trial = optuna.trial.create_trial(value=0.0, params={"decisions.kind": value}, distributions=distributions)
    [word] = words_of_trial(trial)
    assert OverridesParser.create().parse_override(word).value() == value
