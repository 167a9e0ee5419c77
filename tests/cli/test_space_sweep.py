"""A search of a model space as it is typed: drawn, trained, killed again and again, and the best model built again."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import mlotool
from mlotool.cli.main import main
from mlotool.core.run_files import read_json

optuna = pytest.importorskip("optuna")

RECIPE = """# @package _global_
# A network with two decisions of one kind, and one that depends on nothing.
defaults:
  - /optimizer@problems.classifier.optimizer: sgd
  - _self_
  - override /data: digits
  - override /sweep: optuna
name: small
data: {sizes: {train: 100, meta: 0, val: 100, test: 100}}
problems:
  classifier:
    module:
      _target_: mlotool.spaces.Space
      base: {_target_: mlotool.models.MLP, image_shape: "${data.image_shape}", num_classes: 10, hidden: [8, 8]}
      inputs: ${data.image_shape}
      mutators:
        - _target_: mlotool.spaces.Operator
          name: activation
          at: {type: ReLU}
          candidates: {relu: null, tanh: {_target_: torch.nn.Tanh}, silu: {_target_: torch.nn.SiLU}}
        - _target_: mlotool.spaces.Insert
          name: norm
          at: layers.1
          candidates:
            none: null
            layer: {_target_: torch.nn.LayerNorm}
            wrong: {_target_: torch.nn.Linear, out_features: 7}
    loss:
      _target_: mlotool.losses.cross_entropy
      roles: {model: classifier}
    stream: {split: train, batch_size: 20}
evaluate: {problem: classifier, metrics: [accuracy], splits: {val: 3, test: end}}
objective: val/accuracy
runner: {max_ticks: 6, log_every: 3}
logger: {mode: disabled, wandb: false}
sweep: {sampler: evolution, sampler_options: {population_size: 5, sample_size: 3}, pruner: none}
"""


def words(*more: str) -> list[str]:
    Path("small.yaml").write_text(RECIPE)
    return ["run", "-m", "+recipe=small.yaml", *more]


def only_sweep() -> Path:
    [sweep] = Path("outputs/small/multirun").iterdir()
    return sweep


def summary_of(folder: Path) -> dict[str, Any]:
    found = read_json(folder, "summary.json")
    assert found is not None
    return found


def test_trials_are_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words("sweep.num_trials=6", "sweep.sampler=random", "sweep.sampler_options=null", "sweep.fuse=6")) == 0
    sweep = only_sweep()
    summaries = {number: summary_of(sweep / str(number)) for number in range(6)}
    assert {each["status"] for each in summaries.values()} == {"finished", "infeasible"}
    for number, summary in summaries.items():
        listed = (sweep / str(number) / "overrides.txt").read_text().splitlines()
        is_wrong = "decisions.norm_0=wrong" in listed
        assert (summary["status"] == "infeasible") == is_wrong
        if is_wrong:
            assert "mutator 'norm': node 'layers.3' does not take what it is given ((b, 7))" in summary["error"]
            assert not (sweep / str(number) / "checkpoints").exists()


def test_one_model_of_a_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(RECIPE)
    assert main(["run", "+recipe=small.yaml", "decisions.activation_0=tanh", "runner.report=false"]) == 0
    [run] = Path("outputs/small").iterdir()
    names = [type(each).__name__ for each in mlotool.load(run, "classifier").modules()]
    assert names.count("Tanh") == names.count("ReLU") == 1
    capsys.readouterr()
    assert main(["run", "+recipe=small.yaml", "decisions.norm_0=wrong"]) == 2
    assert "mutator 'norm': node 'layers.3' does not take" in capsys.readouterr().err


@pytest.mark.slow
def test_a_search_that_is_killed_twenty_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(mlotool.__file__).parents[1])}
    command = [sys.executable, "-m", "mlotool", *words("sweep.num_trials=40", "sweep.fuse=4", "resume=auto")]
    moments, num_kills = random.Random(0), 0
    while num_kills < 20:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            code = process.wait(timeout=moments.uniform(2, 16))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            num_kills += 1
            continue
        assert code == 0
        break
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert num_kills >= 5
    sweep = only_sweep()
    jobs = sorted(int(each.name) for each in sweep.iterdir() if each.name.isdigit())
    statuses = {job: summary_of(sweep / str(job))["status"] for job in jobs}
    assert len(jobs) == 40
    assert set(statuses.values()) <= {"finished", "infeasible"}
    study = optuna.load_study(study_name=None, storage=f"sqlite:///{sweep / 'study.db'}")
    told = {each.number: each.state.name for each in study.trials}
    assert len(told) == len(study.trials)
    assert all(told[job] == ("COMPLETE" if statuses[job] == "finished" else "FAIL") for job in jobs)
    # What has no folder died while it was drawn.
    assert all(state == "FAIL" for number, state in told.items() if number not in jobs)
    best = max((job for job in jobs if statuses[job] == "finished"), key=lambda job: study.trials[job].value)
    trained = mlotool.load(sweep / str(best), "classifier").state_dict()
    build = f"mlotool.load({str(sweep / str(best))!r}, 'classifier').state_dict()"
    script = f"import torch, mlotool; torch.save({build}, 'built.pt')"
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)
    built = torch.load("built.pt", weights_only=True)
    assert built.keys() == trained.keys()
    assert all(torch.equal(tensor, built[name]) for name, tensor in trained.items())
