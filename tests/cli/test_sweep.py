"""A sweep as it is typed: real jobs, in a process of its own."""

import csv
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlotool.runner.checkpoint import read_checkpoint
from tests import forked
from tests.cli.conftest import Call, Recipe


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sweep=optuna", "seed=interval(1,9)", "sweep.sampler_options={n_trails: 3}"], "sampler_options.n_trails"),
        (["sweep=optuna", "seed=interval(1,9)", "objective=null"], "objective: found null"),
        (["sweep=optuna", "problems.classifier.optimizer.lr=interval(-1,1)"], "optimizer.lr: found -1.0"),
        (["seed=1,2", "sweep.workers=2", "sweep.launcher_options={a: 1}"], "sweep.launcher_options: found {'a': 1}"),
        (["seed=1,2", "sweep.workers=2", "resume=nowhere"], "nowhere'"),
        (["seed=1,2", "sweep.workers=3", "sweep.devices=[0,1]"], "sweep.workers: found 3 with the devices 0, 1"),
    ],
)
def test_a_sweep_that_cannot_start_leaves_nothing(call: Call, tmp_path: Path, words: list[str], message: str) -> None:
    if "sweep=optuna" in words:
        pytest.importorskip("optuna")
    code, _, err = call("run", "-m", "+recipe=plain", *words)
    assert code == 2 and message in err and not list(tmp_path.glob("outputs/*/multirun/*"))


def test_what_a_recipe_sweeps_is_swept_by_a_grid_too(call: Call, recipe: Recipe, tmp_path: Path) -> None:
    lines = 'name: swept\nsweep: {params: {seed: "0,1"}}'
    command = ("run", "-m", str(recipe(lines)), "debug=fast", "logger=csv", "runner.report=false")
    for words, seeds in (((), "01"), (("resume=auto",), "01"), (("seed=3", "hydra.sweep.dir=other"), "3")):
        code, _, err = call(*command, *words)
        assert code == 0, err
        [sweep] = [tmp_path / "other"] if "seed=3" in words else (tmp_path / "outputs/swept/multirun").iterdir()
        assert [row["seed"] for row in rows_of(sweep)] == [*seeds]
        assert ("resume=auto" in words) == (f"going on with the sweep in {sweep.relative_to(tmp_path)}" in err)


# Slow until the file is there, so that no job ends before all were interrupted.
PATIENT_LOSS = """
import time
from pathlib import Path

from mlotool.losses import cross_entropy


def loss(batch, *, model):
    if not Path(__file__).with_name("go").exists():
        time.sleep(0.2)
    return cross_entropy(batch, model=model)
"""


def wait_until(process: forked.Forked, is_so: Callable[[], bool]) -> None:
    """Wait for a moment of a command; one that ends before is an error."""
    until = time.monotonic() + 200
    while not is_so():
        assert process.poll() is None, "it has ended before it could be killed"
        assert time.monotonic() < until
        time.sleep(0.01)


def begin(words: list[str], folder: Path) -> forked.Forked:
    """Begin a command in a forked process, whose output goes to out.txt and errors.txt."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "out.txt").open("w") as out, (folder / "errors.txt").open("w") as errors:
        output = (out.fileno(), errors.fileno())
        return forked.command(*words, folder=folder, environment=environment, output=output)


# Kills of a sweep's processes in tests/sweep/test_processes.py take less.
@pytest.mark.slow
def test_jobs_of_workers_go_on_from_their_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "patient").mkdir()
    (tmp_path / "patient" / "__init__.py").write_text(PATIENT_LOSS)
    words = ["run", "-m", "+recipe=plain", "debug=fast", "logger=csv", "runner.report=false", "--trust", "patient"]
    words += ["debug.limit_ticks=40", "runner.max_ticks=40", "seed=0,1", "sweep.workers=2"]
    words += ["runner.checkpoint_seconds=0.05", "problems.classifier.loss._target_=patient.loss", "resume=auto"]
    errors = tmp_path / "errors.txt"
    first = begin(words, tmp_path)
    multirun = tmp_path / "outputs" / "plain" / "multirun"
    # Not while the runs begin, which takes no tick.
    last = "*/*/checkpoints/last.ckpt"
    wait_until(first, lambda: sum(read_checkpoint(path)["tick"] > 0 for path in multirun.glob(last)) == 2)
    first.send_signal(signal.SIGTERM)
    code, err = first.wait(), errors.read_text()
    assert code == 143, err
    [sweep] = multirun.iterdir()
    interrupted = [json.loads((sweep / job / "summary.json").read_text()) for job in "01"]
    assert {each["status"] for each in interrupted} == {"interrupted"}
    # The sweep says how it goes on; of a job alone, its command would be wrong.
    assert "resume=auto: found no sweep of this command" in err
    assert "go on with it: the same command with resume=outputs/plain/multirun" in err
    assert all("go on with" not in (sweep / job / "log.txt").read_text() for job in "01")

    (tmp_path / "patient" / "go").touch()
    assert begin(words, tmp_path).wait() == 0, errors.read_text()
    assert [each.name for each in multirun.iterdir()] == [sweep.name]
    for job, before in zip("01", interrupted, strict=True):
        assert json.loads((sweep / job / "summary.json").read_text())["num_ticks"] == 40
        [resume] = json.loads((sweep / job / "provenance.json").read_text())["resumes"]
        assert 0 < before["num_ticks"] == resume["tick"]
    rows = list(csv.DictReader((sweep / "sweep.csv").read_text().splitlines()))
    assert [row["status"] for row in rows] == ["finished", "finished"]


RATE = "problems.classifier.optimizer.lr"
WORDS = ["run", "-m", "+recipe=plain", "debug=fast", "logger=csv", "problems.classifier.module.hidden=[4]"]


def sweep_of(folder: Path) -> Path:
    [sweep] = (folder / "outputs" / "plain" / "multirun").iterdir()
    return sweep


def rows_of(sweep: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((sweep / "sweep.csv").read_text().splitlines()))


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text())


def test_a_job_that_is_refused_does_not_end_those_beside_it(tmp_path: Path) -> None:
    words = [*WORDS, "seed=-1,0", f"{RATE}=0.1,1e30", "sweep.fuse=4", "runner.max_ticks=4"]
    code = begin(words, tmp_path).wait()
    errors, sweep = (tmp_path / "errors.txt").read_text(), sweep_of(tmp_path)
    assert code == 1, errors
    rows = rows_of(sweep)
    assert [row["status"] for row in rows] == ["failed", "failed", "finished", "failed"]
    assert all(rows[number]["error"].startswith("seed: found -1") for number in (0, 1))
    assert "became nan" in rows[3]["error"]
    assert "4 jobs, up to 4 in a process" in errors and "3 of 4 jobs of the sweep failed: 0, 1, 3" in errors
    assert read(sweep, "groups.json") == {"groups": [[0, 1, 2, 3]]}
    # A job in a group is a run like any other, but for its page, which is made when it is asked for.
    expected = {"config.yaml", "metrics.csv", "summary.json", "provenance.json", "overrides.txt", "recipe.yaml"}
    assert expected <= {each.name for each in (sweep / "2").iterdir()}
    assert not (sweep / "2" / "report.html").exists() and "2/report.html" not in (sweep / "sweep.html").read_text()
    assert (sweep / "2" / "overrides.txt").read_text().split()[-2:] == ["seed=0", f"{RATE}=0.1"]


WRONG = {
    "a key": ("params: {runner.max_tick: '1,2'}", "runner.max_tick"),
    "the near end": (f"method: optuna, params: {{{RATE}: 'interval(-1,1)'}}", f"{RATE}: found -1.0"),
    "two seeds": ("method: optuna, repeats: 2, params: {seed: '1,2'}", "seed"),
    "an option": ("method: optuna, sampler_options: {n_trails: 3}", "sampler_options.n_trails: found an option"),
    "every value": (f"method: optuna, sampler: brute_force, params: {{{RATE}: 'interval(1,2)'}}", RATE),
}


def test_refused(call: Call, recipe: Recipe) -> None:
    for place, (sweep, message) in enumerate(WRONG.values()):
        code, _, err = call("validate", str(recipe(f"sweep: {{{sweep}}}", f"wrong{place}")))
        assert code == 2, sweep
        assert message in err
    params = f"{{seed: '0,-1,x', {RATE}: '0.1,-0.1', data: 'digits,digitz'}}"
    code, _, err = call("validate", str(recipe(f"sweep: {{params: {params}}}")))
    faults = [line.partition(";")[0].removeprefix("mlotool: error: ") for line in err.splitlines()]
    assert code == 2 and faults[:3] == ["seed: found -1", "seed: found 'x'", f"{RATE}: found -0.1"]
    assert "Did you mean 'digits'?" in faults[3]
