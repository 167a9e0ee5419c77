"""One-shot searches, both stages, as they are typed: killed ten times each, and ended as if nothing had been."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import mlotool
from tests.cli.test_space_sweep import finished, statuses_of, summary_of, wait_for, written
from tests.runner.test_resume import assert_same

pytest.importorskip("optuna")

SHARED = """# @package _global_
# A space as one network, of which a policy draws paths.
defaults:
  - /optimizer@problems.classifier.optimizer: sgd
  - /optimizer@problems.architecture.optimizer: adam
  - _self_
  - override /data: digits
  - override /hypergradient: first_order
name: small
data: {sizes: {train: 100, meta: 100, val: 100, test: 100}}
problems:
  architecture:
    module: {_target_: mlotool.spaces.PathPolicy, space: "${problems.classifier.module}"}
    loss:
      _target_: mlotool.losses.expected_path_cross_entropy
      roles: {model: classifier, paths: architecture}
    stream: {split: meta, batch_size: 20}
  classifier:
    module:
      _target_: mlotool.spaces.Space
      shared: true
      base: {_target_: mlotool.models.ResNet, depth: 8, width: 2, image_shape: "${data.image_shape}", num_classes: 10}
      inputs: ${data.image_shape}
      mutators:
        - _target_: mlotool.spaces.Operator
          name: filter
          at: "stages.*.*.convolution_1"
          candidates:
            k3: null
            k5: {_target_: torch.nn.Conv2d, kernel_size: 5, padding: 2}
            k1: {_target_: torch.nn.Conv2d, kernel_size: 1, padding: 0}
    loss:
      _target_: mlotool.losses.path_cross_entropy
      roles: {model: classifier, paths: architecture}
    stream: {split: train, batch_size: 20}
graph:
  upper_to_lower: {architecture: [classifier]}
  lower_to_upper: {classifier: [architecture]}
evaluate: {problem: classifier, metrics: [accuracy], splits: {val: 6, test: end}, arguments: {path: architecture.found}}
analyses:
  search: {_target_: mlotool.losses.path_analysis, roles: {paths: architecture}, split: val}
objective: val/accuracy
runner: {max_ticks: 60, log_every: 7, checkpoint_seconds: 1.0e-9, report: false, trace: false}
logger: {mode: disabled, wandb: false}
"""
SINGLE = """# @package _global_
# One model of the same space, with the weights of the network of all.
defaults:
  - /optimizer@problems.classifier.optimizer: sgd
  - _self_
  - override /data: digits
  - override /sweep: optuna
name: small
inherit: outputs/shared
data: {sizes: {train: 100, meta: 100, val: 100, test: 100}}
problems:
  classifier:
    MODULE
    loss: {_target_: mlotool.losses.cross_entropy, roles: {model: classifier}}
    stream: {split: train, batch_size: 20}
evaluate: {problem: classifier, metrics: [accuracy], splits: {val: 1, test: end}, recalibrate: 3}
objective: val/accuracy
runner: {max_ticks: 0, report: false}
logger: {mode: disabled, wandb: false}
sweep: {sampler: brute_force, num_trials: 27, fuse: 3}
"""
NUM_KILLS = 10
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(mlotool.__file__).parents[1])}


def start(*words: str) -> "subprocess.Popen[bytes]":
    """Start a command of mlotool."""
    command = [sys.executable, "-m", "mlotool", "run", *words]
    return subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL)


def search(folder: str) -> "subprocess.Popen[bytes]":
    """Start the search with shared weights, or let it go on."""
    return start("+recipe=shared.yaml", f"hydra.run.dir=outputs/{folder}", "resume=auto")


def write_recipes() -> None:
    """Write both."""
    Path("shared.yaml").write_text(SHARED)
    begin = SHARED.index("    module:\n      _target_: mlotool.spaces.Space")
    module = SHARED[begin : SHARED.index("    loss:\n", begin)].replace("      shared: true\n", "").strip()
    Path("small.yaml").write_text(SINGLE.replace("MODULE", module))


def results(sweep: Path) -> dict[str, Any]:
    """Return the metrics of each model."""
    assert set(statuses_of(sweep).values()) == {"finished"}
    summaries = {each: summary_of(sweep / str(each)) for each in statuses_of(sweep)}
    return {
        str(dict(OmegaConf.load(sweep / str(number) / "config.yaml").decisions)): (each["metrics"], each["objective"])
        for number, each in summaries.items()
    }


@pytest.mark.slow
def test_a_search_with_shared_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_recipes()
    assert search("whole").wait() == 0
    chance, num_kills = random.Random(0), 0
    while num_kills < NUM_KILLS:
        process = search("killed")
        last = Path("outputs/killed/checkpoints/last.ckpt")
        before = last.stat().st_mtime_ns if last.exists() else None
        # Until it trains.
        while process.poll() is None and (not last.exists() or last.stat().st_mtime_ns == before):
            time.sleep(0.002)
        time.sleep(chance.uniform(0.0, 0.1))
        assert process.poll() is None, "the search has ended before it could be killed"
        process.send_signal(signal.SIGKILL)
        process.wait()
        num_kills += 1
    assert search("killed").wait() == 0
    assert_same(Path("outputs/killed"), Path("outputs/whole"))
    found = [Path("outputs", each, "artifacts/search_decisions.txt").read_text() for each in ("killed", "whole")]
    assert found[0] == found[1]


@pytest.mark.slow
def test_an_evaluation_of_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_recipes()
    assert search("shared").wait() == 0
    evaluate = ("-m", "+recipe=small.yaml", "resume=auto")
    assert start("-m", "+recipe=small.yaml", "hydra.sweep.dir=outputs/whole").wait() == 0
    chance, ends = random.Random(0), dict[int, set[tuple[str, int]]]()
    taken_up = set[tuple[str, int]]()
    for number in range(NUM_KILLS):
        process = start(*evaluate)
        sweep = wait_for(process, "plan.json", taken_up)
        taken_up = written(sweep, "plan.json")
        if number % 2:
            wait_for(process, "*/summary.json", written(sweep, "*/summary.json"))
        time.sleep(chance.uniform(0, 0.3))
        assert process.poll() is None, "the evaluation has ended before it could be killed"
        process.send_signal(signal.SIGKILL)
        process.wait()
        now = finished(sweep)
        assert ends.items() <= now.items()
        ends = now
    assert start(*evaluate).wait() == 0
    assert ends and ends.items() <= finished(sweep).items()
    found, expected = results(sweep), results(Path("outputs/whole"))
    assert len(found) == 27 and found == expected
