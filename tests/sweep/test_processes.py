"""Sweeps as they are typed, with processes whose jobs train nothing."""

import csv
import json
import os
import signal
import time
from collections.abc import Callable
from importlib.resources import files
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

import mlotool
from tests import forked
from tests.report.html_check import read_page
from tests.sweep import tiny_job
from tests.sweep.plans import trials

Sweep = Callable[..., tuple[int, str, str]]


def begun(*words: str, **variables: str) -> tuple[Any, ...]:
    """Return what a process is to call, with the arguments of `tests.forked`."""
    # For the processes of cluster launchers, which are not forked.
    home = str(Path(mlotool.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": home, "CUDA_VISIBLE_DEVICES": "", **variables}
    return tiny_job.sweep, ("run", "-m", "+recipe=plain", *words), environment


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    """Run a sweep to its end; return the exit code and what it has printed."""

    def run(*words: str, **variables: str) -> tuple[int, str, str]:
        function, given, environment = begun(*words, **variables)
        done = forked.run(function, given, folder=tmp_path, environment=environment)
        assert "Traceback" not in done.stdout + done.stderr
        return done.returncode, done.stdout, done.stderr

    return run


def sweep_folder(tmp_path: Path) -> Path:
    [folder] = (tmp_path / "outputs" / "plain" / "multirun").iterdir()
    return folder


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text())


def rows_of(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / "sweep.csv").read_text().splitlines()))


def test_two_workers_run_side_by_side_and_jobs_that_fail_end_no_others(sweep: Sweep, tmp_path: Path) -> None:
    words = ["seed=1,13,2,14,3", "runner.max_ticks=40", "sweep.workers=2"]
    code, out, err = sweep(*words, CUDA_VISIBLE_DEVICES="5,7")
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
    rows = rows_of(folder)
    assert [row["status"] for row in rows] == ["finished", "failed", "finished", "failed", "finished"]
    assert rows[1]["error"] == "thirteen is refused"
    assert "killed by signal 11" in rows[3]["error"]
    assert rows[3]["seed"] == "14"
    assert "2 of 5 jobs of the sweep failed: 1, 3" in err
    script = files("mlotool.report").joinpath("sort_table.js").read_text(encoding="utf-8")
    assert "thirteen is refused" in read_page(folder / "sweep.html", script).text
    assert read(folder, "plan.json")["keys"] == {"seed": {"num_values": 5, "is_log": False}}
    assert "failed" in out


def test_jobs_of_several_devices_share_no_process(sweep: Sweep, tmp_path: Path) -> None:
    code, out, err = sweep("seed=1,2", "runner.devices=2", "runner.accelerator=cpu", "sweep.fuse=2")
    assert code == 0, err
    folder = sweep_folder(tmp_path)
    assert read(folder / "0", "began.json")["pid"] != read(folder / "1", "began.json")["pid"]
    assert "sweep.fuse: the jobs run one by one: runner.devices=2" in err
    assert "jobs 0, 1 ran one by one; runner.devices=2" in out


def test_a_search_in_groups_tells_the_study_of_each_job(sweep: Sweep, tmp_path: Path) -> None:
    """Each is a trial of its own; the last group has what is left."""
    pytest.importorskip("optuna")
    words = ["sweep=optuna", "sweep.num_trials=5", "sweep.fuse=2", "sweep.sampler=random", "seed=interval(1,9)"]
    pruner = ("sweep.pruner=median", "sweep.pruner_options={n_startup_trials: 1, n_warmup_steps: 0}")
    code, out, err = sweep(*words, *pruner, "sweep.seed=0")
    assert code == 0, err
    folder = sweep_folder(tmp_path)
    groups = read(folder, "groups.json")["groups"]
    # A seed that is drawn again is no job.
    assert [len(group) for group in groups] == [2, 2, 1]
    pids = [read(folder / str(number), "began.json")["pid"] for group in groups for number in group]
    assert [pids[place] == pids[place - 1] for place in range(1, 5)] == [True, False, True, False]
    rows = rows_of(folder)
    states, found = {"COMPLETE": "finished", "PRUNED": "pruned"}, trials(folder)
    assert [row["status"] for row in rows] == [states[found[int(row["job"])].state.name] for row in rows]
    assert {"finished", "pruned"} == {row["status"] for row in rows}
    assert "pruned" in out


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM, signal.SIGKILL]
)
def test_a_signal_stops_the_jobs_and_says_how_to_go_on(tmp_path: Path, number: signal.Signals) -> None:
    """No job outlives its sweep; one that is killed says nothing."""
    function, given, environment = begun("seed=1,2", "runner.max_ticks=20000", "sweep.workers=2")
    with (tmp_path / "errors.txt").open("w") as errors:
        output = (errors.fileno(), errors.fileno())
        process = forked.start(function, given, folder=tmp_path, environment=environment, output=output)
    until = time.monotonic() + 60
    while len(jobs := [*tmp_path.glob("outputs/plain/multirun/*/*/began.json")]) < 2:
        assert time.monotonic() < until
        time.sleep(0.01)
    process.send_signal(number)
    assert process.wait(60) == (-number if number == signal.SIGKILL else 128 + number)
    text = (tmp_path / "errors.txt").read_text()
    assert ("resume=outputs/plain/multirun/" in text) == (number != signal.SIGKILL)
    pids, until = [json.loads(each.read_text())["pid"] for each in jobs], time.monotonic() + 5
    while any(map(forked.is_alive, pids)):
        assert number == signal.SIGKILL and time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("launcher", "package", "options", "fuse"),
    [
        ("slurm", "submitit", "{cluster: local, timeout_min: 5}", 2),
        pytest.param("ray", "ray", "{num_cpus: 1}", 2, marks=pytest.mark.slow),
    ],
)
def test_a_cluster_launcher_in_its_local_mode(
    sweep: Sweep, tmp_path: Path, launcher: str, package: str, options: str, fuse: int
) -> None:
    pytest.importorskip(package)
    cluster = (f"sweep.launcher={launcher}", f"sweep.launcher_options={options}")
    code, _, err = sweep("seed=1,13", f"sweep.fuse={fuse}", "sweep.workers=2", *cluster)
    assert code == 1, err
    assert [row["status"] for row in rows_of(sweep_folder(tmp_path))] == ["finished", "failed"]
