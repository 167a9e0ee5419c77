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
from tests.sweep.plans import known, make_plan, run

SEED = Dimension("seed", ("1", "2"))


def test_auto_takes_the_newest_folder_of_the_same_sweep(tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert choose_folder(make_plan(tmp_path / name, SEED), None) == (tmp_path / name, False)
    choose_folder(make_plan(tmp_path / "c", Dimension("seed", ("1", "3"))), None)
    again = make_plan(tmp_path / "d", SEED, workers=2)
    assert choose_folder(again, "auto") == (tmp_path / "b", True)
    assert choose_folder(make_plan(tmp_path / "e", Dimension("seed", ("7",))), "auto") == (tmp_path / "e", False)


def test_another_sweep_is_not_gone_on_with(tmp_path: Path) -> None:
    choose_folder(make_plan(tmp_path / "a", SEED), None)
    plan = make_plan(tmp_path / "b", SEED)
    with pytest.raises(ConfigError, match=r"resume: found fixed = .*seed=9.*Repeat it with resume"):
        choose_folder(replace(plan, fixed=("+recipe=plain", "seed=9")), str(tmp_path / "a"))
    with pytest.raises(ConfigError, match=r"resume: found '.*', which has no sweep.json; expected .*resume=auto"):
        choose_folder(plan, str(tmp_path))
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


def test_a_broken_file_is_another_sweep(tmp_path: Path) -> None:
    choose_folder(make_plan(tmp_path / "a", SEED), None)
    (tmp_path / "a" / "sweep.json").write_text('{"identity": {"fix')
    assert choose_folder(make_plan(tmp_path / "b", SEED), "auto") == (tmp_path / "b", False)


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


def test_workers_get_devices_and_threads(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, SEED, workers=2)
    found = worker_environments(plan, {"CUDA_VISIBLE_DEVICES": "3,4", "OMP_NUM_THREADS": "1"})
    assert found == [{"CUDA_VISIBLE_DEVICES": "3"}, {"CUDA_VISIBLE_DEVICES": "4"}]
    found = worker_environments(make_plan(tmp_path, SEED, workers=2, devices=["0", "1"]), {"OMP_NUM_THREADS": "1"})
    assert [each["CUDA_VISIBLE_DEVICES"] for each in found] == ["0", "1"]
    on_cpu = worker_environments(replace(plan, accelerator="cpu"), {"CUDA_VISIBLE_DEVICES": "3"})
    assert [list(each) for each in on_cpu] == [["OMP_NUM_THREADS"]] * 2
    with pytest.raises(ConfigError, match=r"sweep\.workers: found 2 with the devices 3"):
        worker_environments(plan, {"CUDA_VISIBLE_DEVICES": "3"})


def test_auto_looks_into_the_folder_that_was_named_first(tmp_path: Path) -> None:
    plan = make_plan(tmp_path / "a", SEED)
    choose_folder(replace(plan, folder=tmp_path / "b"), None)
    assert choose_folder(plan, "auto") == (tmp_path / "b", True)
    choose_folder(plan, None)
    assert choose_folder(plan, "auto") == (tmp_path / "a", True)
    with pytest.raises(ConfigError, match="resume: found fixed = "):
        choose_folder(replace(plan, fixed=("+recipe=plain", "seed=9")), "auto")


@pytest.mark.parametrize("resume", [None, "auto"])
@pytest.mark.parametrize("name", ["checkpoints/last.ckpt", "config.yaml", "notes.txt"])
def test_a_folder_with_files_is_no_jobs(tmp_path: Path, name: str, resume: str | None) -> None:
    """It would be gone on with as the job's own run, or be removed."""
    path = tmp_path / "a" / "3" / name
    path.parent.mkdir(parents=True)
    path.touch()
    with pytest.raises(ConfigError, match=r"found .*a/3, which holds files already, .* Name another one, or remove it"):
        choose_folder(make_plan(tmp_path / "a", SEED), resume)
    assert path.exists() and not (tmp_path / "a" / "sweep.json").exists()


def test_a_job_whose_folder_was_removed_has_its_row(tmp_path: Path) -> None:
    note_failure(tmp_path / "1", ("seed=1",), "Its folder is gone.")
    assert read_outcome(tmp_path / "1") == JobOutcome("failed", None, "Its folder is gone.")
    assert (tmp_path / "1" / "overrides.txt").read_text() == "seed=1\n"


def test_a_job_that_is_refused_has_ended_only_when_all_of_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def dies_before(path: Path, text: str) -> None:
        if path.name == "summary.json":
            raise Killed
        path.write_text(text)

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr("mlotool.sweep.job_folder.write_text", dies_before)
        note_failure(tmp_path / "0", ("seed=1",), "it does not fit", "infeasible")
    assert (tmp_path / "0" / "overrides.txt").read_text() == "seed=1\n"
    assert read_outcome(tmp_path / "0").status == "unfinished"


FOUR = ["0", "1", "2", "3"]


@pytest.mark.parametrize(("value", "devices"), [("GPU-a, 1", ["GPU-a", "1"]), ("", []), ("-1", [])])
def test_devices_are_those_that_the_process_may_use(value: str, devices: list[str]) -> None:
    assert visible_devices({"CUDA_VISIBLE_DEVICES": value}) == devices


@pytest.mark.parametrize(
    ("devices", "num_workers", "per_job", "jobs_per_device", "expected"),
    [
        (FOUR, 2, 2, 1, [["0", "1"], ["2", "3"]]),
        (FOUR, 6, 1, 2, [["0"], ["1"], ["2"], ["3"], ["0"], ["1"]]),
        ([], 3, 1, 1, [[], [], []]),
        (["0", "1"], 3, 1, 1, r"found 3 with the devices 0, 1.*Set sweep\.workers=2, or sweep\.jobs_per_device=2"),
        (["0"], 3, 2, 1, r"Set runner\.devices=1\."),
    ],
)
def test_workers_take_devices_in_turn(
    devices: list[str], num_workers: int, per_job: int, jobs_per_device: int, expected: list[list[str]] | str
) -> None:
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            worker_devices(devices, num_workers, per_job=per_job, jobs_per_device=jobs_per_device)
    else:
        assert worker_devices(devices, num_workers, per_job=per_job, jobs_per_device=jobs_per_device) == expected
