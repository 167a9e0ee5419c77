"""A sweep as it is typed: real jobs, in a process of its own."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import mlotool
from tests import forked
from tests.cli.conftest import Result


@pytest.mark.slow
def test_six_jobs_are_six_runs_and_one_table(tmp_path: Path) -> None:
    words = ["+recipe=mwn", "hypergradient=finite_difference,neumann,cg", "seed=1,2", "logger=wandb"]
    words += ["runner.max_ticks=4", "debug=fast", "runner.progress_bar=false"]
    environment = {**os.environ, "WANDB_MODE": "offline", "PYTHONPATH": str(Path(mlotool.__file__).parents[1])}
    command = [sys.executable, "-m", "mlotool", "run", "-m", *words]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    [sweep] = (tmp_path / "outputs" / "mwn" / "multirun").iterdir()
    jobs = sorted(path.name for path in sweep.iterdir() if path.is_dir())
    assert jobs == ["0", "1", "2", "3", "4", "5", "report"]
    jobs.remove("report")

    offline_runs = [[path.name for path in (sweep / job / "wandb").glob("offline-run-*")] for job in jobs]
    assert [len(names) for names in offline_runs] == [1] * 6
    # offline-run-<date>_<time>-<id>
    assert len({names[0].rpartition("-")[2] for names in offline_runs}) == 6

    rows = list(csv.DictReader((sweep / "sweep.csv").read_text().splitlines()))
    choices = [(name, str(seed)) for name in ("finite_difference", "neumann", "cg") for seed in (1, 2)]
    assert [(row["job"], row["status"], row["objective"]) for row in rows] == [
        (job, "finished", "val/accuracy") for job in jobs
    ]
    for row, choice in zip(rows, choices, strict=True):
        assert (row["hypergradient"], row["seed"]) == choice
        assert 0 <= float(row["value"]) <= 1

    heading = next(index for index, line in enumerate(result.stdout.splitlines()) if line.startswith("job "))
    printed = result.stdout.splitlines()[heading + 1 : heading + 8]
    assert printed[-1].strip() == ""
    for row, choice, line in zip(rows, choices, printed[:-1], strict=True):
        assert line.split()[:4] == [row["job"], *choice, f"{float(row['value']):.4g}"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sweep=optuna", "seed=interval(1,9)", "sweep.sampler_options={n_trails: 3}"], "sampler_options.n_trails"),
        (["sweep=optuna", "seed=interval(1,9)", "objective=null"], "objective: found null"),
        (["seed=1,2", "sweep.workers=2", "sweep.launcher_options={a: 1}"], "sweep.launcher_options: found {'a': 1}"),
        (["seed=1,2", "sweep.workers=2", "resume=nowhere"], "nowhere'"),
        (["seed=1,2", "sweep.workers=3", "sweep.devices=[0,1]"], "sweep.workers: found 3 with the devices 0, 1"),
    ],
)
def test_a_sweep_that_cannot_start_leaves_nothing(
    call: Callable[..., Result], tmp_path: Path, words: list[str], message: str
) -> None:
    if "sweep=optuna" in words:
        pytest.importorskip("optuna")
    code, _, err = call("run", "-m", "+recipe=plain", *words)
    assert code == 2
    assert message in err
    assert not list(tmp_path.glob("outputs/*/multirun/*"))


@pytest.mark.parametrize("words", [(), ("+sweep.params.seed='0,1'",), ("seed=3,4,5",)])
def test_what_a_recipe_sweeps_is_swept_by_a_grid_too(
    words: tuple[str, ...], call: Callable[..., Result], tmp_path: Path
) -> None:
    params = "" if words[:1] == ("+sweep.params.seed='0,1'",) else 'sweep: {params: {seed: "0,1"}}\n'
    (tmp_path / "swept.yaml").write_text(
        f"# @package _global_\n# Mine.\ndefaults: [plain, _self_]\nname: swept\n{params}"
    )
    code, _, err = call("run", "-m", "swept.yaml", "debug=fast", "logger=csv", "runner.report=false", *words)
    assert code == 0, err
    [sweep] = (tmp_path / "outputs" / "swept" / "multirun").iterdir()
    seeds = [row["seed"] for row in csv.DictReader((sweep / "sweep.csv").read_text().splitlines())]
    assert seeds == (["3", "4", "5"] if "seed=3,4,5" in words else ["0", "1"])
    code, _, err = call(
        "run", "-m", "swept.yaml", "debug=fast", "logger=csv", "runner.report=false", *words, "resume=auto"
    )
    assert code == 0, err
    assert f"going on with the sweep in {sweep.relative_to(tmp_path)}" in err
    assert list(sweep.parent.iterdir()) == [sweep]


def test_sweep_settings_without_a_sweep_warn(call: Callable[..., Result]) -> None:
    code, _, err = call("run", "+recipe=plain", "seed=-1", "sweep.workers=2")
    assert code == 2
    assert "found sweep settings, which act in a sweep only; add -m" in err


# Slow until the file is there, so that no job ends before all were interrupted.
PATIENT_LOSS = """
import time
from pathlib import Path

from mlotool.losses import cross_entropy


def loss(batch, *, model):
    if not Path(__file__).with_name("go").exists():
        time.sleep(0.1)
    return cross_entropy(batch, model=model)
"""


def _begin(is_forked: bool, words: list[str], folder: Path, errors: Path) -> "forked.Forked | subprocess.Popen[bytes]":
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(mlotool.__file__).parents[1])}
    with Path(os.devnull).open("w") as nowhere, errors.open("w") as error:
        if is_forked:
            output = (nowhere.fileno(), error.fileno())
            return forked.command(*words, folder=folder, environment=environment, output=output)
        command = [sys.executable, "-m", "mlotool", *words]
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=nowhere, stderr=error)


@pytest.mark.parametrize("is_forked", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_jobs_of_workers_go_on_from_their_checkpoints(tmp_path: Path, is_forked: bool) -> None:
    """Forked or not: importing torch in the processes of six jobs and sweeps takes longer than all that they do."""
    (tmp_path / "patient").mkdir()
    (tmp_path / "patient" / "__init__.py").write_text(PATIENT_LOSS)
    words = ["run", "-m", "+recipe=plain", "debug=fast", "logger=csv", "runner.report=false", "--trust", "patient"]
    words += ["debug.limit_ticks=400", "runner.max_ticks=400", "seed=0,1", "sweep.workers=2"]
    words += ["runner.checkpoint_seconds=0.05", "problems.classifier.loss._target_=patient.loss", "resume=auto"]
    errors = tmp_path / "errors.txt"
    first = _begin(is_forked, words, tmp_path, errors)
    multirun = tmp_path / "outputs" / "plain" / "multirun"
    until = time.monotonic() + 120
    while len(list(multirun.glob("*/*/checkpoints/last.ckpt"))) < 2:
        assert first.poll() is None, errors.read_text()
        assert time.monotonic() < until
        time.sleep(0.01)
    first.send_signal(signal.SIGTERM)
    code, err = first.wait(), errors.read_text()
    assert code == 143, err
    [sweep] = multirun.iterdir()
    interrupted = [json.loads((sweep / job / "summary.json").read_text()) for job in "01"]
    assert {each["status"] for each in interrupted} == {"interrupted"}
    # The sweep says how it goes on; of a job alone, its command would be wrong.
    assert "resume=auto: there is no sweep by these words" in err
    assert "go on with it: the same command with resume=outputs/plain/multirun" in err
    assert all("go on with" not in (sweep / job / "log.txt").read_text() for job in "01")

    (tmp_path / "patient" / "go").touch()
    assert _begin(is_forked, words, tmp_path, errors).wait() == 0, errors.read_text()
    assert [each.name for each in multirun.iterdir()] == [sweep.name]
    for job, before in zip("01", interrupted, strict=True):
        assert json.loads((sweep / job / "summary.json").read_text())["num_ticks"] == 400
        [resume] = json.loads((sweep / job / "provenance.json").read_text())["resumes"]
        assert 0 < before["num_ticks"] == resume["tick"]
    rows = list(csv.DictReader((sweep / "sweep.csv").read_text().splitlines()))
    assert [row["status"] for row in rows] == ["finished", "finished"]


def test_the_folder_of_a_sweep_with_workers_wants_its_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[..., Result]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "swept").mkdir()
    (tmp_path / "swept" / "sweep.json").write_text("{}")
    code, _, err = call("run", "-m", "+recipe=plain", "seed=0,1", "resume=swept")
    assert code == 2
    assert "'swept', a sweep that ran in processes of its own" in err
    assert "sweep.workers=2" in err
