"""A sweep as it is typed: real jobs, in a process of its own."""

import csv
import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests import forked
from tests.cli.conftest import Call


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
def test_a_sweep_that_cannot_start_leaves_nothing(call: Call, tmp_path: Path, words: list[str], message: str) -> None:
    if "sweep=optuna" in words:
        pytest.importorskip("optuna")
    code, _, err = call("run", "-m", "+recipe=plain", *words)
    assert code == 2 and message in err and not list(tmp_path.glob("outputs/*/multirun/*"))


@pytest.mark.parametrize("words", [("+sweep.params.seed='0,1'",), ("seed=3,4",)])
def test_what_a_recipe_sweeps_is_swept_by_a_grid_too(words: tuple[str, ...], call: Call, tmp_path: Path) -> None:
    params = "" if words[:1] == ("+sweep.params.seed='0,1'",) else 'sweep: {params: {seed: "0,1"}}\n'
    head = "# @package _global_\n# Mine.\ndefaults: [plain, _self_]\nname: swept\n"
    (tmp_path / "swept.yaml").write_text(head + params)
    command = ("run", "-m", "swept.yaml", "debug=fast", "logger=csv", "runner.report=false", *words)
    code, _, err = call(*command)
    assert code == 0, err
    [sweep] = (tmp_path / "outputs" / "swept" / "multirun").iterdir()
    seeds = [row["seed"] for row in csv.DictReader((sweep / "sweep.csv").read_text().splitlines())]
    assert seeds == (["3", "4"] if "seed=3,4" in words else ["0", "1"])
    code, _, err = call(*command, "resume=auto")
    assert code == 0 and f"going on with the sweep in {sweep.relative_to(tmp_path)}" in err
    assert list(sweep.parent.iterdir()) == [sweep]


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


def begin(words: list[str], folder: Path) -> forked.Forked:
    """Begin a command in a forked process, whose output goes to out.txt and errors.txt."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "out.txt").open("w") as out, (folder / "errors.txt").open("w") as errors:
        output = (out.fileno(), errors.fileno())
        return forked.command(*words, folder=folder, environment=environment, output=output)


def test_jobs_of_workers_go_on_from_their_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "patient").mkdir()
    (tmp_path / "patient" / "__init__.py").write_text(PATIENT_LOSS)
    words = ["run", "-m", "+recipe=plain", "debug=fast", "logger=csv", "runner.report=false", "--trust", "patient"]
    words += ["debug.limit_ticks=120", "runner.max_ticks=120", "seed=0,1", "sweep.workers=2"]
    words += ["runner.checkpoint_seconds=0.05", "problems.classifier.loss._target_=patient.loss", "resume=auto"]
    errors = tmp_path / "errors.txt"
    first = begin(words, tmp_path)
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
    assert begin(words, tmp_path).wait() == 0, errors.read_text()
    assert [each.name for each in multirun.iterdir()] == [sweep.name]
    for job, before in zip("01", interrupted, strict=True):
        assert json.loads((sweep / job / "summary.json").read_text())["num_ticks"] == 120
        [resume] = json.loads((sweep / job / "provenance.json").read_text())["resumes"]
        assert 0 < before["num_ticks"] == resume["tick"]
    rows = list(csv.DictReader((sweep / "sweep.csv").read_text().splitlines()))
    assert [row["status"] for row in rows] == ["finished", "finished"]
