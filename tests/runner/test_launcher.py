"""Runs on two ranks from the command line and from Python: their files, their errors, their end."""

import csv
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

import mlotool
from mlotool.config import Origin, trust
from mlotool.config.trusted import trusted_packages
from mlotool.core.errors import ConfigError
from mlotool.runner import run_config
from mlotool.runner.checkpoint import read_checkpoint
from mlotool.runner.run_config import Launch
from tests import forked

FAULTY = """
import os
import signal

from mlotool.losses import cross_entropy

calls = []


def loss(batch, *, model, mode):
    calls.append(1)
    loss = cross_entropy(batch, model=model).loss
    if len(calls) > 20 and os.environ["RANK"] == "1":
        if mode == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("nothing to see in this batch")
    return loss
"""
RECIPE = """# @package _global_
# A test's recipe.
defaults: [plain, _self_]
name: bad
problems: {classifier: {loss: {_target_: faulty.loss, mode: raise}}}
"""
QUIET = ("logger=csv", "runner.report=false", "runner.progress_bar=false", "evaluate=null", "objective=null")


def start(folder: Path, *words: str) -> "subprocess.Popen[str]":
    home = Path(mlotool.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(home), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "mlotool", "run", *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_forked(folder: Path, *words: str) -> tuple[int, str, str]:
    """Return the exit code and the output of a command; neither it nor its ranks import anything."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        output = out.fileno(), err.fileno()
        process = forked.command("run", *words, folder=folder, environment=environment, output=output)
        try:
            code = process.wait(timeout=300)
        finally:
            process.kill()
        texts = [file.seek(0) or file.read() for file in (out, err)]
    assert "Traceback" not in texts[1]
    return code, texts[0], texts[1]


def ranks_of(parent: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def is_alive(process: int) -> bool:
    status = Path(f"/proc/{process}/status")
    return status.exists() and "\nState:\tZ" not in status.read_text()


def only(folder: Path, pattern: str) -> Path:
    [found] = folder.glob(pattern)
    return found


@pytest.mark.parametrize(
    ("mode", "code", "words"),
    [
        ("raise", 1, ["Rank 1 of 2 failed: After tick", "ValueError: nothing to see in this batch"]),
        pytest.param("kill", 137, ["Rank 1 of 2 ended with signal 9 (SIGKILL)"], marks=pytest.mark.slow),
    ],
)
def test_a_failing_rank_ends_the_run_with_its_message(tmp_path: Path, mode: str, code: int, words: list[str]) -> None:
    (tmp_path / "faulty.py").write_text(FAULTY)
    (tmp_path / "bad.yaml").write_text(RECIPE)
    given = ("bad.yaml", "--trust", "faulty", *QUIET, "runner.devices=2", f"problems.classifier.loss.mode={mode}")
    found, _, err = run_forked(tmp_path, *given)
    assert found == code, err
    errors = [line for line in err.splitlines() if "error:" in line]
    assert len(errors) == 1
    summary = json.loads(only(tmp_path, "outputs/bad/*/summary.json").read_text())
    assert summary["status"] == "failed"
    for word in words:
        assert word in errors[0]
        assert word in summary["error"]


def test_mwn_on_two_ranks_leaves_one_run(tmp_path: Path) -> None:
    """The same numbers as on one rank, up to float32's rounding in the finite differences."""
    runs = {}
    for count in (1, 2):
        (tmp_path / str(count)).mkdir()
        words = ("+recipe=mwn", "debug=fast", f"runner.devices={count}", "runner.log_every=1")
        code, out, err = run_forked(tmp_path / str(count), *words)
        assert code == 0, err
        assert out.count("run folder") == 1
        folder = only(tmp_path, f"{count}/outputs/mwn/*")
        with (folder / "metrics.csv").open() as file:
            rows = {(row["tick"], row["key"]): float(row["value"]) for row in csv.DictReader(file)}
        runs[count] = rows
        assert len(list(folder.glob("wandb/offline-run-*"))) == 1
        assert (folder / "report.html").is_file()
        assert len(read_checkpoint(folder / "checkpoints" / "last.ckpt")["random_states"]) == count
    assert runs[1].keys() == runs[2].keys()
    for key, value in runs[1].items():
        assert runs[2][key] == pytest.approx(value, rel=1e-3, abs=1e-3), key


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for processes in /proc")
def test_a_signal_leaves_a_checkpoint_and_no_process(tmp_path: Path, number: int, code: int) -> None:
    """Of processes as users have them: none of the three is forked."""
    process = start(tmp_path, "plain", *QUIET, "runner.devices=2", "runner.max_ticks=1000000", "runner.log_every=10")
    deadline = time.monotonic() + 200
    while not any("loss" in file.read_text() for file in tmp_path.glob("outputs/plain/*/metrics.csv")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    ranks = ranks_of(process.pid)
    assert len(ranks) == 2
    process.send_signal(number)
    _, err = process.communicate(timeout=100)
    assert process.returncode == code, err
    assert not any(map(is_alive, ranks))
    folder = only(tmp_path, "outputs/plain/*")
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    state = read_checkpoint(folder / "checkpoints" / "last.ckpt")
    assert state["tick"] == summary["num_ticks"] > 0
    assert not torch.equal(*(each["torch"] for each in state["random_states"]))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for processes in /proc")
def test_no_rank_outlives_a_killed_parent(tmp_path: Path) -> None:
    process = start(tmp_path, "plain", *QUIET, "runner.devices=2", "runner.max_ticks=1000000", "runner.log_every=10")
    while not list(tmp_path.glob("outputs/plain/*/metrics.csv")):
        assert process.poll() is None
        time.sleep(0.1)
    ranks = ranks_of(process.pid)
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 20
    while any(map(is_alive, ranks)):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_from_python_it_gives_the_result_of_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_config, "_start", forked.start_rank)
    words = [*QUIET[:3], "runner.devices=2", "runner.max_ticks=20", "debug.limit_samples=100"]
    result = mlotool.run(mlotool.compose("plain", words), output_dir=tmp_path / "run")
    assert result.output_dir == tmp_path / "run"
    assert result.checkpoint == tmp_path / "run" / "checkpoints" / "best.ckpt"
    assert result.objective == result.metrics["val/accuracy"]
    assert mlotool.load(result.output_dir, "classifier").training is False
    with pytest.raises(ConfigError, match="run holds a run already"):
        mlotool.run(mlotool.compose("plain", words), output_dir=tmp_path / "run")


def test_packages_are_trusted_where_they_were_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of a script is on its import path, and not on that of the ranks."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(run_config, "watch_parent", lambda: None)
    home = tmp_path / "script"
    home.mkdir()
    (home / "besides.py").write_text("")
    monkeypatch.setattr(sys, "path", [str(home), *sys.path])
    monkeypatch.chdir(tmp_path)
    trust("besides")
    Launch(tmp_path).ask({"name": "a_test"}, None, Origin("a test", (), None), None)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place not in (str(home), str(tmp_path))])
    monkeypatch.setattr(run_config, "run", lambda *_, **__: None)
    assert (run_config.serve(tmp_path), trusted_packages()) == (0, {"besides": str(home)})
