"""Runs on two ranks from the command line and from Python: their files, their errors, their end."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import mlotool
from mlotool.config import Origin, trust
from mlotool.config.security.trusted import trusted_packages
from mlotool.core.errors import ConfigError, Interrupted
from mlotool.runner import run_config
from mlotool.runner.checkpoint import read_checkpoint
from mlotool.runner.run_config import Launch
from tests import forked
from tests.runner.test_run_config import read_metrics

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
QUIET = ("logger=csv", "runner.report=false", "runner.progress_bar=false", "evaluate=null", "objective=null")


def run_forked(folder: Path, *words: str) -> tuple[int, str, str]:
    """Return the exit code and the output of a command; neither it nor its ranks import anything."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = forked.run(forked.call_mlotool, ("run", *words), folder=folder, environment=environment)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout, done.stderr


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
    loss = ("problems.classifier.loss._target_=faulty.loss", f"+problems.classifier.loss.mode={mode}")
    found, _, err = run_forked(tmp_path, "plain", "--trust", "faulty", *QUIET, "runner.devices=2", *loss)
    assert found == code, err
    errors = [line for line in err.splitlines() if "error:" in line]
    assert len(errors) == 1
    summary = json.loads(only(tmp_path, "outputs/plain/*/summary.json").read_text())
    assert summary["status"] == "failed"
    for word in words:
        assert word in errors[0]
        assert word in summary["error"]


def test_mwn_on_two_ranks_leaves_one_run(tmp_path: Path) -> None:
    """The same numbers as on one rank, up to float32's rounding in the finite differences."""
    words = ("debug=fast", "runner.log_every=1")
    code, out, err = run_forked(tmp_path, "+recipe=mwn", *words, "logger=wandb", "runner.devices=2")
    assert code == 0, err
    assert out.count("run folder") == 1
    folder = only(tmp_path, "outputs/mwn/*")
    assert len(list(folder.glob("wandb/offline-run-*"))) == 1
    assert (folder / "report.html").is_file()
    assert len(read_checkpoint(folder / "checkpoints" / "last.ckpt")["random_states"]) == 2
    mlotool.run(mlotool.compose("mwn", [*words, *QUIET[:3]]), output_dir=tmp_path / "one")
    found, expected = (
        {(tick, key): value for tick, key, value in read_metrics(each)} for each in (folder, tmp_path / "one")
    )
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=1e-3, abs=1e-3), key


ENDLESS = (*QUIET, "runner.devices=2", "runner.max_ticks=1000000", "runner.log_every=10")


def wait_for_a_loss(folder: Path) -> None:
    deadline = time.monotonic() + 200
    while not any("loss" in file.read_text() for file in folder.rglob("metrics.csv")):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_signal_leaves_a_checkpoint_and_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks: list[forked.Forked] = []

    def start(*given: Any) -> forked.Forked:
        ranks.append(forked.start_rank(*given))
        return ranks[-1]

    def stop() -> None:
        wait_for_a_loss(tmp_path)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(run_config, "_start", start)
    threading.Thread(target=stop).start()
    with pytest.raises(Interrupted) as caught:
        mlotool.run(mlotool.compose("plain", list(ENDLESS)), output_dir=tmp_path / "run")
    assert (caught.value.exit_code, caught.value.run_dir) == (143, tmp_path / "run")
    assert [rank.poll() for rank in ranks] == [130, 130]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    state = read_checkpoint(tmp_path / "run" / "checkpoints" / "last.ckpt")
    assert state["tick"] == summary["num_ticks"] > 0
    assert not torch.equal(*(each["torch"] for each in state["random_states"]))


def test_a_rank_is_an_interpreter_with_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs as `sys.executable` does, for which a script stands here."""
    script = tmp_path / "python"
    script.write_text('#!/bin/sh\necho "$RANK of $WORLD_SIZE: $@" > "$0.said"\ncat\n')
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    process = run_config._start(tmp_path, 1, run_config._shared_environment(2))
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(60) == 0
    assert (tmp_path / "python.said").read_text() == f"1 of 2: -P -m mlotool rank {tmp_path}\n"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for processes in /proc")
def test_no_rank_outlives_its_parent(tmp_path: Path, number: int) -> None:
    """Of processes as users have them: none of the three is forked."""
    environment = {**os.environ, "PYTHONPATH": str(Path(mlotool.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "mlotool", "run", "plain", *ENDLESS]
    process = subprocess.Popen(words, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    wait_for_a_loss(tmp_path)
    ranks = [int(each) for each in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    assert len(ranks) == 2
    process.send_signal(number)
    _, err = process.communicate(timeout=100)
    assert process.returncode == (130 if number == signal.SIGINT else -number), err
    deadline = time.monotonic() + 20
    while any(map(forked.is_alive, ranks)):
        assert number == signal.SIGKILL and time.monotonic() < deadline
        time.sleep(0.1)


def test_from_python_it_gives_the_result_of_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_config, "_start", forked.start_rank)
    words = [*QUIET[:3], "runner.devices=2", "runner.max_ticks=4", "debug.limit_samples=100"]
    config = mlotool.compose("plain", words)
    result = mlotool.run(config, output_dir=tmp_path / "run")
    assert result.output_dir == tmp_path / "run"
    assert result.checkpoint == tmp_path / "run" / "checkpoints" / "best.ckpt"
    assert result.objective == result.metrics["val/accuracy"]
    assert mlotool.load(result.output_dir, "classifier").training is False
    with pytest.raises(ConfigError, match="run holds a run already"):
        mlotool.run(config, output_dir=tmp_path / "run")


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
