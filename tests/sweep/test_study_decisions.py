"""Decisions of model spaces in a study: asked one by one, told as infeasible, repeated, and the same after a kill."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from mlotool.config.check_choices import sweep_node_faults

from mlotool.config.schema import SweepConfig
from mlotool.config.sweep_plan import Dimension
from mlotool.core.errors import ConfigError, InfeasibleModelError, RunError, WriteError
from mlotool.sweep.driver import run_jobs
from mlotool.sweep.job_folder import JobOutcome, JobSpec, read_job, read_outcome
from mlotool.sweep.study import StudyPoints, StudyValues
from mlotool.sweep.trials import words_of
from tests.sweep.plans import HereAndNow, known, make_plan, sweep_in

optuna = pytest.importorskip("optuna")

RATE = Dimension("lr", low=1e-3, high=1e-1, log=True)
Decide = Callable[[str, tuple[Any, ...]], Any]


def draw(words: Sequence[str], decide: Decide) -> dict[str, Any]:
    """Ask for what only some models have, for whole numbers, and for a range that depends on them."""
    decisions = {"kind": decide("kind", ("a", "b"))}
    if decisions["kind"] == "b":
        decisions["depth"] = decide("depth", (1, 2, 3))
        decisions["source"] = decide("source", tuple(range(decisions["depth"] + 1)))
        decisions["width"] = decide("width", (8, 32))
    return decisions


def values_of(spec: JobSpec) -> dict[str, str]:
    return dict(word.lstrip("+").split("=") for word in spec.words if "=" in word)


def score(folder: Path, spec: JobSpec) -> tuple[str, float]:
    values = values_of(spec)
    return "finished", float(values.get("decisions.depth", 0)) + float(values.get("seed", 0))


def run(points: StudyPoints, folder: Path, job: Any = score, announced: Any = None) -> HereAndNow:
    launcher = HereAndNow(job)
    run_jobs(points, launcher, [{}], sweep_in(folder, announced=announced))
    return launcher


def trials(folder: Path) -> list[Any]:
    found: list[Any] = optuna.load_study(study_name=None, storage=f"sqlite:///{folder / 'study.db'}").trials
    return found


@pytest.mark.parametrize("sampler", ["tpe", "random", "evolution", "reinforce", "predictor", "brute_force"])
def test_a_job_has_the_decisions_of_its_trial(tmp_path: Path, sampler: str) -> None:
    plan = make_plan(tmp_path, num_trials=4, sampler=sampler)
    points = StudyPoints(plan, tmp_path, known(tmp_path), draw)
    started = run(points, tmp_path).started
    assert len(started) == 4
    for trial in (each for each in trials(tmp_path) if str(each.number) in started):
        values = values_of(read_job(tmp_path / str(trial.number)))
        decided = {key: value for key, value in values.items() if key.startswith("decisions.")}
        assert decided == {key: str(value) for key, value in trial.params.items()}
        assert ("decisions.depth" in decided) == (decided["decisions.kind"] == "b")


def few(words: Sequence[str], decide: Decide) -> dict[str, Any]:
    kind = decide("kind", ("a", "b"))
    return {"kind": kind} if kind == "a" else {"kind": kind, "depth": decide("depth", (1, 2, 3))}


def test_brute_force_ends_where_all_have_been_tried(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, num_trials=50, sampler="brute_force")
    points = StudyPoints(plan, tmp_path, known(tmp_path), few)
    # a; b with three depths.
    assert len(run(points, tmp_path).started) == 1 + 3
    found = [tuple(sorted(trial.params.items())) for trial in trials(tmp_path)]
    assert len(set(found)) == len(found) == points.total
    assert StudyPoints(plan, tmp_path, known(tmp_path), few).next() is None


def test_brute_force_in_groups_tries_each_once(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, num_trials=50, sampler="brute_force", fuse=8)
    points = StudyPoints(
        plan, tmp_path, known(tmp_path), lambda words, decide: {"kind": decide("kind", ("a", "b", "c"))}
    )
    assert len(run(points, tmp_path).started) == 3
    assert (points.num_ended, points.total) == (3, 3)
    again = StudyPoints(
        plan, tmp_path, known(tmp_path), lambda words, decide: {"kind": decide("kind", ("a", "b", "c"))}
    )
    assert (again.num_ended, again.next()) == (3, None)


def test_what_makes_no_model_is_told_and_not_trained(tmp_path: Path) -> None:
    def refuse_a(words: Sequence[str], decide: Decide) -> dict[str, Any]:
        decisions = draw(words, decide)
        if decisions["kind"] == "a":
            raise InfeasibleModelError("node 'x' does not fit")
        return decisions

    plan, announced = make_plan(tmp_path, RATE, num_trials=8, sampler="random", fuse=4), list[tuple[int, str]]()
    points = StudyPoints(plan, tmp_path, known(tmp_path), refuse_a)
    launcher = run(points, tmp_path, announced=announced)
    kinds = {trial.number: trial.params["decisions.kind"] for trial in trials(tmp_path)}
    refused = [number for number, kind in kinds.items() if kind == "a"]
    assert refused
    assert launcher.started == [str(number) for number, kind in kinds.items() if kind == "b"]
    assert sorted(announced) == [(number, "infeasible" if number in refused else "finished") for number in range(8)]
    for number in refused:
        assert trials(tmp_path)[number].state.name == "FAIL"
        assert read_outcome(tmp_path / str(number)).error == "node 'x' does not fit"
    assert points.num_ended == 8
    assert StudyPoints(plan, tmp_path, known(tmp_path), refuse_a).num_ended == 8


def test_a_trial_whose_process_died_while_it_was_drawn_is_drawn_to_its_end(tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    def die(words: Sequence[str], decide: Decide) -> dict[str, Any]:
        draw(words, decide)
        raise Killed

    plan = make_plan(tmp_path, RATE, num_trials=4)
    with pytest.raises(Killed):
        run(StudyPoints(plan, tmp_path, known(tmp_path), die), tmp_path)
    [before] = trials(tmp_path)
    launcher = run(StudyPoints(plan, tmp_path, known(tmp_path), draw), tmp_path)
    assert launcher.started == ["0", "1", "2", "3"]
    assert [trial.state.name for trial in trials(tmp_path)] == ["COMPLETE"] * 4
    assert trials(tmp_path)[0].params == before.params


def test_repetitions_have_seeds_and_a_mean(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, num_trials=3, repeats=3, seed=2)
    points = StudyPoints(plan, tmp_path, known(tmp_path), draw)
    assert run(points, tmp_path).started == [str(number) for number in range(9)]
    for trial in trials(tmp_path):
        specs = [read_job(tmp_path / str(3 * trial.number + copy)) for copy in range(3)]
        assert [values_of(spec)["seed"] for spec in specs] == ["0", "1", "2"]
        assert len({tuple(word for word in spec.words if "seed" not in word) for spec in specs}) == 1
        assert all(spec.study is None for spec in specs)
        assert trial.value == trial.params.get("decisions.depth", 0) + 1
    assert (points.num_ended, points.total) == (9, 9)


def test_a_repetition_that_failed_leaves_no_mean(tmp_path: Path) -> None:
    def job(folder: Path, spec: JobSpec) -> tuple[str, float]:
        return ("failed" if folder.name == "1" else "finished"), 1.0

    plan = make_plan(tmp_path, num_trials=2, repeats=2)
    run(StudyPoints(plan, tmp_path, known(tmp_path), draw), tmp_path, job)
    assert [trial.state.name for trial in trials(tmp_path)] == ["FAIL", "COMPLETE"]


def test_repetitions_go_on_after_a_kill(tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    def die(folder: Path, spec: JobSpec) -> tuple[str, float]:
        if folder.name == "4":
            raise Killed
        return score(folder, spec)

    plan = make_plan(tmp_path, RATE, num_trials=3, repeats=3, sampler="evolution")
    with pytest.raises(Killed):
        run(StudyPoints(plan, tmp_path, known(tmp_path), draw), tmp_path, die)
    points = StudyPoints(plan, tmp_path, known(tmp_path), draw)
    assert points.num_ended == 4
    assert run(points, tmp_path).started == ["4", "5", "6", "7", "8"]
    (tmp_path / "other").mkdir()
    other = make_plan(tmp_path / "other", RATE, num_trials=3, repeats=3, sampler="evolution")
    run(StudyPoints(other, tmp_path / "other", known(tmp_path / "other"), draw), tmp_path / "other")
    found = [[(trial.params, trial.value) for trial in trials(folder)] for folder in (tmp_path, tmp_path / "other")]
    assert found[0] == found[1]


def test_repetitions_beside_a_seed_that_is_searched(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, Dimension("seed", ("0", "1")), repeats=2)
    with pytest.raises(ConfigError, match=r"sweep.repeats: found 2 beside a seed that is searched; expected one"):
        StudyPoints(plan, tmp_path, known(tmp_path), draw)


def test_a_second_objective_that_no_job_has(tmp_path: Path) -> None:
    second = {"second_objective": "classifier/num_paramters", "second_objective_mode": "min"}
    values = StudyValues(make_plan(tmp_path, num_trials=3, sampler="nsga2", **second))
    (tmp_path / "summary.json").write_text(json.dumps({"metrics": {"a": 1.0}, "num_parameters": {"classifier": 3}}))
    with pytest.raises(RunError, match=r"which .* has not; .* Did you mean 'classifier/num_parameters'"):
        values.add(0, 0, JobOutcome("finished", 1.0, ""), tmp_path)


def test_two_objectives(tmp_path: Path) -> None:
    def job(folder: Path, spec: JobSpec) -> tuple[str, float]:
        depth = int(values_of(spec).get("decisions.depth", 0))
        (folder / "extra.json").write_text(json.dumps({"classifier": 100 * depth}))
        return "finished", float(depth)

    class WithParameters(HereAndNow):
        def _run(self, folder: Path) -> None:
            super()._run(folder)
            summary = json.loads((folder / "summary.json").read_text())
            summary["num_parameters"] = json.loads((folder / "extra.json").read_text())
            (folder / "summary.json").write_text(json.dumps(summary))

    second = {"second_objective": "classifier/num_parameters", "second_objective_mode": "min"}
    plan = make_plan(tmp_path, num_trials=6, sampler="nsga2", **second)
    run_jobs(StudyPoints(plan, tmp_path, known(tmp_path), draw), WithParameters(job), [{}], sweep_in(tmp_path))
    assert all(trial.values == [trial.values[1] / 100, trial.values[1]] for trial in trials(tmp_path))
    study = optuna.load_study(study_name=None, storage=f"sqlite:///{tmp_path / 'study.db'}")
    assert [each.name for each in study.directions] == ["MAXIMIZE", "MINIMIZE"]


@pytest.mark.parametrize("sampler", ["evolution", "reinforce", "predictor"])
def test_samplers_of_one_objective_refuse_two(sampler: str) -> None:
    second = {"second_objective": "classifier/num_parameters", "second_objective_mode": "min"}
    [fault] = sweep_node_faults({"sweep": {**asdict(SweepConfig()), **second, "method": "optuna", "sampler": sampler}})
    assert f"found {sampler} beside sweep.second_objective" in fault
    [fault] = sweep_node_faults({"sweep": {**asdict(SweepConfig()), **second, "second_objective_mode": "less"}})
    assert "expected min or max" in fault
    [fault] = sweep_node_faults({"sweep": {**asdict(SweepConfig()), "repeats": 3}})
    assert "found 3 in a grid" in fault


def test_names_that_change_from_trial_to_trial(tmp_path: Path) -> None:
    asked: list[str] = []

    def other(words: Sequence[str], decide: Decide) -> dict[str, Any]:
        asked.append("")
        return {"kind": decide("kind", tuple(f"k{number}" for number in range(len(asked) + 1)))}

    with pytest.raises(RunError, match=r"decisions.kind: found the candidates k0, k1, k2, others than in an earl"):
        run(StudyPoints(make_plan(tmp_path, num_trials=3), tmp_path, known(tmp_path), other), tmp_path)


def test_a_search_goes_on_after_candidates_that_changed_are_corrected(tmp_path: Path) -> None:
    plan, is_corrected = make_plan(tmp_path, num_trials=8, sampler="random", pruner="none"), False

    def depends(words: Sequence[str], decide: Decide) -> dict[str, Any]:
        depth = decide("depth", (1, 2, 4, 8))
        name = f"extra_{depth}" if is_corrected else "extra"
        return {"depth": depth, name: decide(name, ("a", f"b{depth}"))}

    with pytest.raises(RunError, match="resume=auto"):
        run(StudyPoints(plan, tmp_path, known(tmp_path), depends), tmp_path)
    before = {trial.number: trial.value for trial in trials(tmp_path) if trial.state.name == "COMPLETE"}
    assert before
    is_corrected = True
    points = StudyPoints(plan, tmp_path, known(tmp_path), depends)
    launcher = run(points, tmp_path)
    assert points.num_ended == points.total
    assert not {str(number) for number in before} & set(launcher.started)
    after = {trial.number: trial.value for trial in trials(tmp_path)}
    assert {number: after[number] for number in before} == before


@pytest.mark.parametrize("value", ["x y", "${seed}", "a=b", 1.5, True, "A"])
def test_a_spoiled_study_has_no_words(tmp_path: Path, value: Any) -> None:
    from optuna.distributions import CategoricalDistribution
    from optuna.trial import create_trial

    plan = make_plan(tmp_path, num_trials=3)
    run(StudyPoints(plan, tmp_path, known(tmp_path), draw), tmp_path, lambda folder, spec: None)
    study = optuna.load_study(study_name=None, storage=f"sqlite:///{tmp_path / 'study.db'}")
    state = optuna.trial.TrialState.RUNNING
    study.add_trial(
        create_trial(
            state=state,
            params={"decisions.other": value},
            distributions={"decisions.other": CategoricalDistribution([value, "b"])},
            user_attrs={"drawn": True},
        )
    )
    with pytest.raises(ConfigError, match=r"found a study .* that is not that of this sweep"):
        StudyPoints(plan, tmp_path, known(tmp_path), draw)


@pytest.mark.parametrize("value", ["null", "true", "false", "nan", "inf", "1e5", "007", "3x3", "on", 7])
def test_words_are_read_as_the_values_that_they_are_made_of(value: Any) -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from optuna.distributions import CategoricalDistribution
    from optuna.trial import create_trial

    distributions = {"decisions.kind": CategoricalDistribution([value, "other"])}
    [word] = words_of(create_trial(value=0.0, params={"decisions.kind": value}, distributions=distributions))
    assert OverridesParser.create().parse_override(word).value() == value


@pytest.mark.parametrize("seed", range(4))
def test_brute_force_ends_where_the_last_model_is_infeasible(tmp_path: Path, seed: int) -> None:
    def one_fits(words: Sequence[str], decide: Decide) -> dict[str, Any]:
        kind = decide("kind", ("x", "y", "z"))
        if kind != "x":
            raise InfeasibleModelError(f"no {kind}")
        return {"kind": kind}

    plan = make_plan(tmp_path, num_trials=10, sampler="brute_force", seed=seed)
    points = StudyPoints(plan, tmp_path, known(tmp_path), one_fits)
    run(points, tmp_path)
    assert (points.total, points.num_ended) == (3, 3)
    study = optuna.load_study(study_name=None, storage=f"sqlite:///{tmp_path / 'study.db'}")
    assert sorted(each.state.name for each in study.trials) == ["COMPLETE", "FAIL", "FAIL"]


def test_a_decision_that_the_command_line_varies_is_its_word(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, Dimension("decisions.depth", choices=("1", "2")), num_trials=2)
    points = StudyPoints(plan, tmp_path, known(tmp_path), lambda words, decide: {"width": decide("width", (8, 16))})
    group = points.next()
    assert group is not None
    first, second = group.points[0].words
    assert first in ("decisions.depth=1", "decisions.depth=2")
    assert second in ("decisions.width=8", "decisions.width=16")


def test_a_full_disk_while_a_decision_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from optuna.storages._cached_storage import _CachedStorage

    def full(self: Any, trial: int, name: str, *more: Any) -> None:
        raise optuna.exceptions.StorageInternalError("the disk is full")

    def careless(words: Sequence[str], decide: Decide) -> dict[str, Any]:
        """Draw as the builder of models does, which takes errors that are not ours for wrong models."""
        try:
            return draw(words, decide)
        except optuna.exceptions.StorageInternalError as error:
            raise ConfigError("the model cannot be built") from error

    points = StudyPoints(make_plan(tmp_path, num_trials=3), tmp_path, known(tmp_path), careless)
    monkeypatch.setattr(_CachedStorage, "set_trial_param", full)
    with pytest.raises(WriteError, match=r"the disk is full\); expected room on its disk"):
        points.next()


def test_a_job_is_without_what_its_models_do_not_ask_for(tmp_path: Path) -> None:
    def with_fixed(words: Sequence[str], decide: Decide) -> dict[str, Any]:
        decisions = few(words, decide)
        return {**decisions, "width": None} if decisions["kind"] == "a" else decisions

    plan = make_plan(tmp_path, num_trials=50, sampler="brute_force")
    run(StudyPoints(plan, tmp_path, known(tmp_path), with_fixed), tmp_path)
    found = {trial.params["decisions.kind"]: read_job(tmp_path / str(trial.number)).words for trial in trials(tmp_path)}
    assert "~decisions.width" in found["a"]
    assert not any(word.startswith("~") for word in found["b"])


@pytest.mark.parametrize("name", ["width=1", "a b", "../x"])
def test_a_spoiled_study_takes_nothing_out(tmp_path: Path, name: str) -> None:
    plan = make_plan(tmp_path, num_trials=4)
    StudyPoints(plan, tmp_path, known(tmp_path), few).next()
    study = optuna.load_study(study_name=None, storage=f"sqlite:///{tmp_path / 'study.db'}")
    study._storage.set_trial_user_attr(study.trials[0]._trial_id, "unasked", [name])
    with pytest.raises(ConfigError, match="is not that of this sweep"):
        StudyPoints(plan, tmp_path, known(tmp_path), few)
