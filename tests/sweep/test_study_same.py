"""Points that a sampler draws again: told what the first job of each has found, and not trained."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from mlotool.config.sweep_plan import Dimension
from mlotool.core.errors import InfeasibleModelError, MlotoolError
from mlotool.sweep.driver import run_jobs
from mlotool.sweep.job_folder import JobSpec, read_job
from mlotool.sweep.study import StudyPoints
from mlotool.sweep.watcher import Watcher
from tests.sweep.plans import HereAndNow, known, make_plan, sweep_in

optuna = pytest.importorskip("optuna")

SEED = Dimension("seed", ("0", "1"))
SIZE = Dimension("width", ("2", "4", "6"))
Decide = Callable[[str, tuple[Any, ...]], Any]


MOST_IN_A_ROW = 15
"""Draws of known points, each of which writes into a database: enough for spaces of four points."""


@pytest.fixture(autouse=True)
def few_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlotool.sweep.study.MOST_IN_A_ROW", MOST_IN_A_ROW)


class Killed(BaseException):
    pass


def draw(words: Sequence[str], decide: Decide) -> dict[str, Any]:
    return {name: decide(name, ("a", "b")) for name in ("first", "second")}


def score(folder: Path, spec: JobSpec) -> tuple[str, float]:
    return "finished", float(sum(map(ord, "".join(word for word in spec.words if "seed" not in word))))


def take_up(folder: Path, *dimensions: Dimension, decides: Any = draw, **settings: Any) -> StudyPoints:
    plan = make_plan(folder, *dimensions, **{"num_trials": 4, "sampler": "random", **settings})
    return StudyPoints(plan, folder, known(folder), decides)


def run(points: StudyPoints, folder: Path, job: Any = score, num_workers: int = 1) -> HereAndNow:
    launcher = HereAndNow(job)
    run_jobs(points, launcher, [{}] * num_workers, sweep_in(folder, known(folder)))
    return launcher


def trials(folder: Path) -> list[Any]:
    found: list[Any] = optuna.load_study(study_name=None, storage=f"sqlite:///{folder / 'study.db'}").trials
    return found


def point(trial: Any) -> tuple[Any, ...]:
    return tuple(sorted(trial.params.items()))


def jobs(folder: Path) -> list[int]:
    return sorted(int(each.name) for each in folder.iterdir() if each.name.isdigit())


@pytest.mark.parametrize(
    "settings", [{}, {"fuse": 3}, {"sampler": "evolution"}, {"sampler": "tpe", "fuse": 4}], ids=str
)
@pytest.mark.parametrize("num_workers", [1, 2])
def test_each_model_is_trained_once(tmp_path: Path, settings: dict[str, Any], num_workers: int) -> None:
    points = take_up(tmp_path, **settings)
    started = run(points, tmp_path, num_workers=num_workers).started
    assert len(started) == len({read_job(tmp_path / name).words for name in started}) == 4
    assert (points.total, points.num_ended, points.ending) == (4, 4, "")
    values = {point(each): each.value for each in trials(tmp_path) if str(each.number) in started}
    found = trials(tmp_path)
    # All that the sampler sees is as if each had been trained.
    assert all((each.state.name, each.value) == ("COMPLETE", values[point(each)]) for each in found)
    others = [each for each in found if str(each.number) not in started]
    assert len(others) == points.num_same == len(found) - 4
    assert all(point(found[each.user_attrs["same_as_trial"]]) == point(each) for each in others)
    assert jobs(tmp_path) == sorted(map(int, started))


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_search_ends_where_there_is_nothing_else(tmp_path: Path, num_workers: int) -> None:
    points = take_up(tmp_path, num_trials=10, fuse=2)
    assert len(run(points, tmp_path, num_workers=num_workers).started) == 4
    assert (points.total, points.num_ended) == (4, 4)
    assert points.ending.startswith(f"the search ends with 4 of 10 jobs: the last {MOST_IN_A_ROW} draws were all of kn")
    assert points.num_same >= MOST_IN_A_ROW
    assert all(each.state.name == "COMPLETE" for each in trials(tmp_path))
    again = take_up(tmp_path, num_trials=10, fuse=2)
    assert (again.num_ended, again.num_same) == (4, points.num_same)
    assert run(again, tmp_path).started == []


def test_a_search_does_not_end_with_jobs_that_were_interrupted(tmp_path: Path) -> None:
    points = take_up(tmp_path, num_trials=10)
    assert len(run(points, tmp_path, lambda folder, spec: ("interrupted", 0.0)).started) == 4
    assert points.num_ended == 0
    assert points.ending.endswith(
        f"the last {MOST_IN_A_ROW} draws were all of known points, of which 4 jobs were interrupted. They go on, and "
        "the search with them: the same command with resume=auto"
    )
    again = take_up(tmp_path, num_trials=10)
    assert len(run(again, tmp_path).started) == again.num_ended == 4


def test_brute_force_says_that_all_were_tried(tmp_path: Path) -> None:
    points = take_up(tmp_path, num_trials=10, sampler="brute_force", fuse=3)
    assert len(run(points, tmp_path).started) == 4
    assert points.ending == "the search ends with 4 of 10 jobs: brute force has tried every point"


def test_without_decisions_a_seed_is_a_part_of_the_point(tmp_path: Path) -> None:
    points = take_up(tmp_path, SEED, SIZE, decides=None, num_trials=6)
    started = run(points, tmp_path).started
    assert len({read_job(tmp_path / name).words for name in started}) == len(started) == 6


def test_repetitions_are_those_of_the_first(tmp_path: Path) -> None:
    points = take_up(tmp_path, repeats=3, fuse=4)
    launcher = run(points, tmp_path)
    assert len(launcher.started) == 12
    # The seeds of a model stay together.
    assert [[int(each) // 3 for each in group] for group in launcher.groups] == [
        [int(group[0]) // 3] * 3 for group in launcher.groups
    ]
    counted = Counter(tuple(word for word in read_job(tmp_path / name).words if "seed" not in word)
                      for name in launcher.started)  # fmt: skip
    assert list(counted.values()) == [3] * 4
    assert all(each.state.name == "COMPLETE" for each in trials(tmp_path))


def test_more_seeds_than_a_group_has_room_for(tmp_path: Path) -> None:
    launcher = run(take_up(tmp_path, repeats=5, fuse=4, num_trials=2), tmp_path)
    assert [len(group) for group in launcher.groups] == [4, 1, 4, 1]


def test_a_group_has_as_many_models_as_it_has_room_for(tmp_path: Path) -> None:
    launcher = run(take_up(tmp_path, repeats=2, fuse=5, num_trials=4), tmp_path)
    assert [len(group) for group in launcher.groups] == [4, 4]


def test_a_pruned_one_is_pruned_again(tmp_path: Path) -> None:
    def job(folder: Path, spec: JobSpec) -> tuple[str, float]:
        assert spec.study is not None
        for tick in (10, 20):
            Watcher(**spec.study)(tick, float(tick))
        return ("pruned" if "decisions.first=a" in "".join(spec.words) else "finished"), 20.0

    points = take_up(tmp_path, num_trials=10, pruner="none")
    run(points, tmp_path, job)
    found = trials(tmp_path)
    assert all(each.state.name == ("PRUNED" if each.params["decisions.first"] == "a" else "COMPLETE") for each in found)
    assert all(each.value == 20.0 for each in found)
    copies = [each for each in found if "same_as_trial" in each.user_attrs]
    assert copies
    for each in copies:
        # Pruners look at what completed trials have reported; samplers at the last value of those that were pruned.
        assert each.intermediate_values == ({20: 20.0} if each.state.name == "PRUNED" else {})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pruner", "options"),
    [
        ("median", {"n_startup_trials": 3}),
        ("percentile", {"percentile": 50.0, "n_startup_trials": 3}),
        ("hyperband", {"max_resource": 2}),
        ("successive_halving", {}),
    ],
)
def test_copies_of_the_best_prune_no_others(tmp_path: Path, pruner: str, options: dict[str, Any]) -> None:
    """A pruner ends the same jobs whether the best point is drawn again between them or not."""
    ends = [_ends(tmp_path / name, pruner, options, has_copies=name == "copies") for name in ("copies", "none")]
    assert ends[0] == ends[1]
    assert len(ends[0]) == 10


def _ends(folder: Path, pruner: str, options: dict[str, Any], *, has_copies: bool) -> dict[int, str]:
    """Return how the jobs of ten points have ended, of which the first is the best and is then drawn again, twice."""

    class InTurn(optuna.samplers.RandomSampler):
        def sample_independent(self, study: Any, trial: Any, name: str, distribution: Any) -> int:
            if not has_copies:
                return int(trial.number)
            return 0 if trial.number % 3 else trial.number // 3

    def job(folder: Path, spec: JobSpec) -> tuple[str, float]:
        assert spec.study is not None
        chosen = int(spec.words[-1].partition("=")[2])
        value, watch = (1.0 if chosen == 0 else 0.1 + chosen / 100), Watcher(**spec.study)
        for tick in (1, 2):
            if watch(tick, value):
                break
        ends[chosen] = "pruned" if watch(3, value) else "finished"
        return ends[chosen], value

    folder.mkdir()
    ends = dict[int, str]()
    points = take_up(
        folder,
        decides=lambda words, decide: {"point": decide("point", tuple(range(30)))},
        num_trials=10,
        pruner=pruner,
        pruner_options=options,
    )
    points._study.sampler = InTurn()
    run(points, folder, job)
    return ends


def test_what_makes_no_model_is_refused_once(tmp_path: Path) -> None:
    def refuse(words: Sequence[str], decide: Decide) -> dict[str, Any]:
        if draw(words, decide)["first"] == "a":
            raise InfeasibleModelError("node 'x' does not fit")
        return {}

    points = take_up(tmp_path, decides=refuse, num_trials=10)
    assert len(run(points, tmp_path).started) == 2
    assert (points.total, points.num_ended, len(jobs(tmp_path))) == (4, 4, 4)
    found = trials(tmp_path)
    assert all(each.state.name == ("FAIL" if each.params["decisions.first"] == "a" else "COMPLETE") for each in found)


def test_one_that_failed_is_tried_again(tmp_path: Path) -> None:
    points = take_up(tmp_path, num_trials=10)
    assert len(run(points, tmp_path, lambda folder, spec: ("failed", 0.0)).started) == 10


@pytest.mark.slow
@pytest.mark.parametrize("value", [float("nan"), None])
@pytest.mark.parametrize("repeats", [1, 2])
def test_one_that_diverged_would_diverge_again(tmp_path: Path, value: Any, repeats: int) -> None:
    points = take_up(tmp_path, num_trials=3, repeats=repeats)
    assert len(run(points, tmp_path, lambda folder, spec: ("finished", value)).started) == 3 * repeats
    again = take_up(tmp_path, num_trials=10, repeats=repeats)
    assert len(run(again, tmp_path, lambda folder, spec: ("finished", value)).started) == repeats
    assert {each.state.name for each in trials(tmp_path)} == {"FAIL"}
    assert again.total == 4 * repeats


def test_two_objectives(tmp_path: Path) -> None:
    class WithParameters(HereAndNow):
        def _run(self, folder: Path) -> None:
            super()._run(folder)
            summary = json.loads((folder / "summary.json").read_text())
            (folder / "summary.json").write_text(json.dumps({**summary, "num_parameters": {"net": int(folder.name)}}))

    second = {"second_objective": "net/num_parameters", "second_objective_mode": "min", "sampler": "nsga2"}
    points = take_up(tmp_path, num_trials=10, **second)
    run_jobs(points, WithParameters(score), [{}], sweep_in(tmp_path))
    found = trials(tmp_path)
    firsts = [each.user_attrs.get("same_as_trial", each.number) for each in found]
    assert all(each.values == found[first].values for each, first in zip(found, firsts, strict=True))
    assert points.total == len(set(firsts)) == 4


@pytest.mark.parametrize("settings", [{"fuse": 4}, {"fuse": 4, "repeats": 2}, {"fuse": 1}], ids=str)
def test_after_a_kill(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Trials that wait for a job go on waiting for it."""
    deaths = iter(range(6))

    def dies(folder: Path, spec: JobSpec) -> tuple[str, float]:
        if next(deaths, None) is not None and int(folder.name) % 2:
            raise Killed
        return score(folder, spec)

    num_kills = 0
    while True:
        points = take_up(tmp_path, num_trials=10, **settings)
        try:
            run(points, tmp_path, dies)
            break
        except Killed:
            num_kills += 1
    assert num_kills > 1
    found, repeats = trials(tmp_path), settings.get("repeats", 1)
    assert points.total == points.num_ended == 4 * repeats == len(jobs(tmp_path))
    firsts = [each for each in found if "same_as_trial" not in each.user_attrs]
    values = {point(each): each.value for each in firsts}
    assert len(firsts) == len(values) == 4
    assert all((each.state.name, each.value) == ("COMPLETE", values[point(each)]) for each in found)


def test_one_that_was_drawn_and_not_noted_before_a_kill(tmp_path: Path) -> None:
    run(take_up(tmp_path, SIZE, decides=None, num_trials=3), tmp_path)
    study = optuna.load_study(study_name=None, storage=f"sqlite:///{tmp_path / 'study.db'}")
    study.ask({"width": optuna.distributions.CategoricalDistribution(SIZE.choices)})
    points = take_up(tmp_path, SIZE, decides=None, num_trials=4)
    assert points.num_ended == 3
    assert trials(tmp_path)[-1].state.name == "COMPLETE"


def test_one_that_makes_no_model_has_its_folder_after_a_kill(tmp_path: Path) -> None:
    """Its process may die while the others of its group are drawn."""

    def refuse(words: Sequence[str], decide: Decide) -> dict[str, Any]:
        if len(trials(tmp_path)) > 1:
            raise Killed
        draw(words, decide)
        raise InfeasibleModelError("node 'x' does not fit")

    with pytest.raises(Killed):
        run(take_up(tmp_path, decides=refuse, fuse=4), tmp_path)
    assert jobs(tmp_path) == []
    points = take_up(tmp_path, fuse=4, num_trials=3)
    assert points.num_ended == 0
    assert "0" not in run(points, tmp_path).started
    summary = json.loads((tmp_path / "0" / "summary.json").read_text())
    assert (summary["status"], summary["error"]) == ("infeasible", "node 'x' does not fit")
    assert points.num_ended == len(jobs(tmp_path)) == 3
    assert take_up(tmp_path, fuse=4, num_trials=3).num_ended == 3


@pytest.mark.parametrize("value", ["0", 7, -1, True, None])
def test_a_spoiled_study(tmp_path: Path, value: Any) -> None:
    run(take_up(tmp_path, num_trials=2), tmp_path)
    study = optuna.load_study(study_name=None, storage=f"sqlite:///{tmp_path / 'study.db'}")
    study.ask().set_user_attr("same_as_trial", [value])
    with pytest.raises(MlotoolError, match=r"that is not that of this sweep"):
        take_up(tmp_path, num_trials=2)
