"""The folder of a sweep, those of its jobs, and the devices of its workers."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mlotool.config.sweep_plan import Dimension
from mlotool.core.errors import ConfigError
from mlotool.sweep.driver import visible_devices, worker_devices, worker_environments
from mlotool.sweep.folder import choose_folder, locked
from mlotool.sweep.job_folder import JobOutcome, note_failure, read_outcome
from mlotool.sweep.points import GridPoints
from tests.sweep.plans import Killed, known, make_plan, run

SEED = Dimension("seed", ("1", "2"))


def test_which_sweep_is_gone_on_with(tmp_path: Path) -> None:
    """With auto the newest folder of the same sweep, or the one that was named."""
    for name in ("a", "b"):
        assert choose_folder(make_plan(tmp_path / name, SEED), None) == (tmp_path / name, False)
    choose_folder(make_plan(tmp_path / "c", Dimension("seed", ("1", "3"))), None)
    again = make_plan(tmp_path / "d", SEED, workers=2)
    assert choose_folder(again, "auto") == (tmp_path / "b", True)
    assert choose_folder(make_plan(tmp_path / "a", SEED), "auto") == (tmp_path / "a", True)
    assert choose_folder(make_plan(tmp_path / "e", Dimension("seed", ("7",))), "auto") == (tmp_path / "e", False)
    # A broken file is that of another sweep.
    (tmp_path / "b" / "sweep.json").write_text('{"identity": {"fix')
    assert choose_folder(again, "auto") == (tmp_path / "a", True)
    other = replace(again, fixed=("+recipe=plain", "seed=9"))
    with pytest.raises(ConfigError, match=r"resume: found fixed = .*seed=9.*Repeat it with resume"):
        choose_folder(other, str(tmp_path / "a"))
    with pytest.raises(ConfigError, match="resume: found fixed = "):
        choose_folder(replace(other, folder=tmp_path / "a"), "auto")
    with pytest.raises(ConfigError, match=r"resume: found '.*', which has no sweep.json; expected .*resume=auto"):
        choose_folder(again, str(tmp_path))
    with pytest.raises(ConfigError, match="holds a sweep already"):
        choose_folder(make_plan(tmp_path / "a", SEED), None)


def test_a_grid_goes_on_for_longer_and_a_study_does_not(tmp_path: Path) -> None:
    for method, is_gone_on_with in (("grid", True), ("optuna", False)):
        plan = replace(make_plan(tmp_path / method / "a", SEED, method=method), fixed=("runner.max_ticks=5",))
        choose_folder(plan, None)
        longer = replace(plan, fixed=("runner.max_ticks=9", "runner.report=false"), folder=tmp_path / method / "b")
        assert choose_folder(longer, "auto") == (tmp_path / method / "ab"[not is_gone_on_with], is_gone_on_with)
        other = replace(longer, fixed=("runner.max_ticks=9", "data=mnist"), folder=tmp_path / method / "c")
        assert choose_folder(other, "auto") == (other.folder, False)


def test_finished_jobs_of_a_grid_are_run_for_longer(tmp_path: Path) -> None:
    """But not one that had stopped early, nor one that failed."""
    plan = make_plan(tmp_path, Dimension("seed", ("1", "2", "3")))
    for number, (status, num_ticks) in enumerate((("finished", 5), ("finished", 4), ("failed", 5))):
        (tmp_path / str(number)).mkdir()
        (tmp_path / f"{number}/summary.json").write_text(json.dumps({"status": status, "num_ticks": num_ticks}))
        (tmp_path / f"{number}/config.yaml").write_text("runner: {max_ticks: 5}")
    for last_tick, waiting in ((9, ["0"]), (5, []), (3, []), (None, [])):
        points = GridPoints(replace(plan, last_tick=last_tick), tmp_path, known(tmp_path))
        found = list(iter(points.next, None))
        assert [[str(point.number) for point in group.points] for group in found if group] == [waiting][: len(waiting)]
        assert points.num_ended == 3 - len(waiting)


def test_two_processes_do_not_share_a_folder(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(ConfigError, match="still running"), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass


def test_a_grid_runs_what_has_not_ended(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, SEED, Dimension("lr", ("0.1", "0.2")))
    for number, status in (("0", "finished"), ("2", "interrupted")):
        (tmp_path / number).mkdir()
        (tmp_path / number / "summary.json").write_text(json.dumps({"status": status}))
    points = GridPoints(plan, tmp_path, known(tmp_path))
    assert (points.num_ended, points.total) == (1, 4)
    launcher = run(points, tmp_path, lambda folder, spec: ("finished", 1.0), num_workers=2)
    assert launcher.started == ["1", "2", "3"]
    assert (tmp_path / "3" / "overrides.txt").read_text().splitlines() == ["+recipe=plain", "seed=2", "lr=0.2"]


@pytest.mark.parametrize(("name", "resume"), [("checkpoints/last.ckpt", None), ("notes.txt", "auto")])
def test_a_folder_with_files_is_no_jobs(tmp_path: Path, name: str, resume: str | None) -> None:
    """It would be gone on with as the job's own run, or be removed."""
    path = tmp_path / "a" / "3" / name
    path.parent.mkdir(parents=True)
    path.touch()
    with pytest.raises(ConfigError, match=r"found .*a/3, which holds files already, .* Name another one, or remove it"):
        choose_folder(make_plan(tmp_path / "a", SEED), resume)
    assert path.exists() and not (tmp_path / "a" / "sweep.json").exists()


def test_a_job_that_is_refused_has_ended_only_when_all_of_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies_before(path: Path, text: str) -> None:
        if path.name == "summary.json":
            raise Killed
        path.write_text(text)

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr("mlotool.sweep.job_folder.write_text", dies_before)
        note_failure(tmp_path / "0", ("seed=1",), "it does not fit", "infeasible")
    assert (tmp_path / "0" / "overrides.txt").read_text() == "seed=1\n"
    assert read_outcome(tmp_path / "0").status == "unfinished"
    note_failure(tmp_path / "0", ("seed=1",), "it does not fit", "infeasible")
    assert read_outcome(tmp_path / "0") == JobOutcome("infeasible", None, "it does not fit")


@pytest.mark.parametrize(("value", "devices"), [("GPU-a, 1", ["GPU-a", "1"]), ("", []), ("-1", [])])
def test_devices_are_those_that_the_process_may_use(value: str, devices: list[str]) -> None:
    assert visible_devices({"CUDA_VISIBLE_DEVICES": value}) == devices


def test_workers_take_devices_in_turn(tmp_path: Path) -> None:
    four = ["0", "1", "2", "3"]
    assert worker_devices(four, 2, per_job=2, jobs_per_device=1) == [["0", "1"], ["2", "3"]]
    assert worker_devices(four, 6, per_job=1, jobs_per_device=2) == [["0"], ["1"], ["2"], ["3"], ["0"], ["1"]]
    assert worker_devices([], 3, per_job=1, jobs_per_device=1) == [[], [], []]
    with pytest.raises(ConfigError, match=r"found 3 with .* 0, 1.*Set sweep\.workers=2, or sweep\.jobs_per_device=2"):
        worker_devices(["0", "1"], 3, per_job=1, jobs_per_device=1)
    with pytest.raises(ConfigError, match=r"Set runner\.devices=1\."):
        worker_devices(["0"], 3, per_job=2, jobs_per_device=1)

    plan, one_thread = make_plan(tmp_path, SEED, workers=2), {"OMP_NUM_THREADS": "1"}
    found = worker_environments(plan, {"CUDA_VISIBLE_DEVICES": "3,4", **one_thread})
    assert found == [{"CUDA_VISIBLE_DEVICES": "3"}, {"CUDA_VISIBLE_DEVICES": "4"}]
    found = worker_environments(make_plan(tmp_path, SEED, workers=2, devices=["0", "1"]), one_thread)
    assert [each["CUDA_VISIBLE_DEVICES"] for each in found] == ["0", "1"]
    on_cpu = worker_environments(replace(plan, accelerator="cpu"), {"CUDA_VISIBLE_DEVICES": "3"})
    assert [list(each) for each in on_cpu] == [["OMP_NUM_THREADS"]] * 2
