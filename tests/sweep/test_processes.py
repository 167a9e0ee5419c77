"""Sweeps as they are typed, with real processes whose jobs train nothing."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.resources import files
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

import mlotool
from tests.report.html_check import read_page

Start = Callable[..., "subprocess.Popen[str]"]
KEY = "problems.classifier.optimizer.lr"


@pytest.fixture
def start(tmp_path: Path) -> Start:
    def begin(*words: str, **variables: str) -> "subprocess.Popen[str]":
        environment = {**os.environ, "PYTHONPATH": str(Path(mlotool.__file__).parents[1]), **variables}
        command = [sys.executable, "-m", "tests.sweep.tiny_driver", "run", "-m", "+recipe=plain", *words]
        return subprocess.Popen(
            command, cwd=tmp_path, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    return begin


def finish(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    assert "Traceback" not in out + err
    return process.returncode, out, err


def sweep_folder(tmp_path: Path) -> Path:
    [folder] = (tmp_path / "outputs" / "plain" / "multirun").iterdir()
    return folder


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text())


def trials(folder: Path) -> list[Any]:
    optuna = pytest.importorskip("optuna")
    study = optuna.load_study(study_name=None, storage=f"sqlite:///{folder / 'study.db'}")
    found: list[Any] = study.trials
    return found


def test_two_workers_run_side_by_side_and_jobs_that_fail_end_no_others(start: Start, tmp_path: Path) -> None:
    words = ["seed=1,13,2,14,3", "runner.max_ticks=100", "sweep.workers=2"]
    code, out, err = finish(start(*words, CUDA_VISIBLE_DEVICES="5,7"))
    assert code == 1
    folder = sweep_folder(tmp_path)
    began = {number: read(folder / str(number), "began.json") for number in range(5)}
    assert len({each["pid"] for each in began.values()}) == 5
    assert {each["devices"] for each in began.values()} == {"5", "7"}
    assert began[0]["devices"] != began[1]["devices"]
    # A device has one job at a time.
    spans = [(began[number]["at"], read(folder / str(number), "ended.json")["at"]) for number in (0, 2, 4)]
    devices = [began[number]["devices"] for number in (0, 2, 4)]
    for (first, device), (second, other) in combinations(zip(spans, devices, strict=True), 2):
        assert device != other or first[1] <= second[0] or second[1] <= first[0]
    rows = list(csv.DictReader((folder / "sweep.csv").read_text().splitlines()))
    assert [row["status"] for row in rows] == ["finished", "failed", "finished", "failed", "finished"]
    assert rows[1]["error"] == "thirteen is refused"
    assert "killed by signal 11" in rows[3]["error"]
    assert rows[3]["seed"] == "14"
    assert "2 of 5 jobs of the sweep failed: 1, 3" in err
    script = files("mlotool.report").joinpath("sort_table.js").read_text(encoding="utf-8")
    assert "thirteen is refused" in read_page(folder / "sweep.html", script).text
    assert read(folder, "plan.json")["keys"] == {"seed": {"num_values": 5, "is_log": False}}
    assert "failed" in out


def test_jobs_of_several_devices_share_no_process(start: Start, tmp_path: Path) -> None:
    code, out, err = finish(start("seed=1,2", "runner.devices=2", "runner.accelerator=cpu", "sweep.fuse=2"))
    assert code == 0, err
    folder = sweep_folder(tmp_path)
    assert read(folder / "0", "began.json")["pid"] != read(folder / "1", "began.json")["pid"]
    assert "sweep.fuse: the jobs run one by one: runner.devices=2" in err
    assert "jobs 0, 1 ran one by one; runner.devices=2" in out


@pytest.mark.slow
def test_a_killed_sweep_leaves_no_jobs_and_is_finished_with_as_many_trials(start: Start, tmp_path: Path) -> None:
    words = ["sweep=optuna", "sweep.num_trials=6", "sweep.workers=2", "sweep.pruner=none", f"{KEY}=interval(0.1,0.9)"]
    # A job takes two seconds.
    words += ["runner.max_ticks=400", "resume=auto"]
    first = start(*words, CUDA_VISIBLE_DEVICES="")
    multirun = tmp_path / "outputs" / "plain" / "multirun"
    until = time.monotonic() + 60
    young: list[Path] = []
    while len(list(multirun.glob("*/*/summary.json"))) < 3 or not young:
        assert first.poll() is None
        assert time.monotonic() < until
        time.sleep(0.01)
        # Far from its end: if it comes to that, it has outlived the kill, not preceded it.
        young = [each for each in _running(multirun) if 0.1 < time.time() - _began(each) < 0.5]
    first.send_signal(signal.SIGKILL)
    first.communicate()
    folder = sweep_folder(tmp_path)
    before = {trial.number: trial for trial in trials(folder)}
    assert any(trial.state.name == "RUNNING" for trial in before.values())
    pids = [read(each, "began.json")["pid"] for each in young]
    until = time.monotonic() + 5
    while any(map(_is_alive, pids)):
        assert time.monotonic() < until, "a job outlived its sweep"
        time.sleep(0.01)
    assert not any((each / "ended.json").exists() for each in young), "a job outlived its sweep"

    code, _, err = finish(start(*words, CUDA_VISIBLE_DEVICES=""))
    assert code == 0, err
    assert sweep_folder(tmp_path) == folder
    after = trials(folder)
    assert [trial.number for trial in after] == list(range(6))
    assert {trial.state.name for trial in after} == {"COMPLETE"}
    # Of real numbers: the seed of what is drawn afterwards depends on the moment of the kill.
    assert len({trial.params[KEY] for trial in after}) == 6
    for number, trial in before.items():
        assert after[number].params == trial.params


def test_a_search_in_groups_tells_the_study_of_each_job(start: Start, tmp_path: Path) -> None:
    """Each is a trial of its own; the last group has what is left."""
    words = ["sweep=optuna", "sweep.num_trials=5", "sweep.fuse=2", "sweep.sampler=random", "seed=interval(1,9)"]
    pruner = ("sweep.pruner=median", "sweep.pruner_options={n_startup_trials: 1}")
    code, out, err = finish(start(*words, *pruner, "sweep.seed=0"))
    assert code == 0, err
    folder = sweep_folder(tmp_path)
    groups = read(folder, "groups.json")["groups"]
    # A seed that is drawn again is no job.
    assert [len(group) for group in groups] == [2, 2, 1]
    pids = [read(folder / str(number), "began.json")["pid"] for group in groups for number in group]
    assert [pids[place] == pids[place - 1] for place in range(1, 5)] == [True, False, True, False]
    rows = list(csv.DictReader((folder / "sweep.csv").read_text().splitlines()))
    states, found = {"COMPLETE": "finished", "PRUNED": "pruned"}, trials(folder)
    assert [row["status"] for row in rows] == [states[found[int(row["job"])].state.name] for row in rows]
    assert {"finished", "pruned"} == {row["status"] for row in rows}
    assert "pruned" in out


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_the_jobs_and_says_how_to_go_on(
    start: Start, tmp_path: Path, number: signal.Signals, expected: int
) -> None:
    process = start("seed=1,2", "runner.max_ticks=20000", "sweep.workers=2", CUDA_VISIBLE_DEVICES="")
    multirun = tmp_path / "outputs" / "plain" / "multirun"
    until = time.monotonic() + 60
    while len(_running(multirun)) < 2:
        assert time.monotonic() < until
        time.sleep(0.01)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == expected
    assert "resume=outputs/plain/multirun/" in err
    assert not any(_is_alive(read(each, "began.json")["pid"]) for each in _running(multirun))


@pytest.mark.parametrize(
    ("launcher", "package", "options", "fuse"),
    [
        ("slurm", "submitit", "{cluster: local, timeout_min: 5}", 1),
        pytest.param("ray", "ray", "{num_cpus: 1}", 2, marks=pytest.mark.slow),
    ],
)
def test_a_cluster_launcher_in_its_local_mode(
    start: Start, tmp_path: Path, launcher: str, package: str, options: str, fuse: int
) -> None:
    pytest.importorskip(package)
    cluster = (f"sweep.launcher={launcher}", f"sweep.launcher_options={options}")
    code, _, err = finish(start("seed=1,13,2", f"sweep.fuse={fuse}", "sweep.workers=2", *cluster))
    assert code == 1, err
    rows = list(csv.DictReader((sweep_folder(tmp_path) / "sweep.csv").read_text().splitlines()))
    assert [row["status"] for row in rows] == ["finished", "failed", "finished"]


def _running(multirun: Path) -> list[Path]:
    return [file.parent for file in multirun.glob("*/*/began.json") if not (file.parent / "summary.json").exists()]


def _began(job: Path) -> float:
    return (job / "began.json").stat().st_mtime


def _is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
