"""Searches as they are typed, killed again and again: they end as if nothing had been, and do nothing twice."""

import csv
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import forked
from tests.runner.test_resume import assert_same

optuna = pytest.importorskip("optuna")
pytestmark = pytest.mark.slow
NUM_KILLS, NUM_TRIALS, SECONDS = 5, 20, 200.0
SHARED = ["+recipe=explore_enas", "data.sizes={train: 100, meta: 100, val: 100, test: 100}", "runner.max_ticks=40",
          "runner.checkpoint_seconds=1e-9", "runner.report=false", "logger=csv", "runner.progress_bar=false",
          "evaluate.splits.val=6", "resume=auto"]  # fmt: skip
STUDY = ["-m", "+recipe=mwn", "debug=fast", "logger=csv", "runner.report=false", "evaluate.splits.val=2", "resume=auto",
         "sweep=optuna", f"sweep.num_trials={NUM_TRIALS}", "sweep.workers=2",
         "problems.classifier.optimizer.lr=tag(log, interval(1e-3, 1e-1))",
         "problems.reweight.optimizer.lr=1e-3,1e-2"]  # fmt: skip


def wait_until(process: forked.Forked, is_so: Callable[[], bool]) -> None:
    """Wait for a moment of a command; one that ends before is an error."""
    until = time.monotonic() + SECONDS
    while not is_so():
        assert process.poll() is None, "it has ended before it could be killed"
        assert time.monotonic() < until
        time.sleep(0.01)


def written(file: Path) -> int:
    return file.stat().st_mtime_ns if file.exists() else 0


def kill(process: forked.Forked) -> None:
    process.kill()
    assert process.wait() == -signal.SIGKILL


def test_a_one_shot_search(tmp_path: Path) -> None:
    def search(name: str) -> forked.Forked:
        return forked.command("run", *SHARED, f"hydra.run.dir={name}", folder=tmp_path)

    assert search("whole").wait() == 0
    chance, last = random.Random(0), tmp_path / "killed" / "checkpoints" / "last.ckpt"
    for _ in range(NUM_KILLS):
        before, process = written(last), search("killed")
        # Until it trains.
        wait_until(process, lambda before=before: written(last) != before)  # type: ignore[misc]
        time.sleep(chance.uniform(0.0, 0.1))
        kill(process)
    assert search("killed").wait() == 0
    assert_same(tmp_path / "killed", tmp_path / "whole")
    texts = {(tmp_path / name / "artifacts/search_decisions.txt").read_text() for name in ("killed", "whole")}
    assert len(texts) == 1


def test_an_optuna_sweep_of_twenty_jobs(tmp_path: Path) -> None:
    multirun = tmp_path / "outputs" / "mwn" / "multirun"
    first = forked.command("run", *STUDY, folder=tmp_path)
    wait_until(first, lambda: len(list(multirun.glob("*/*/summary.json"))) >= NUM_TRIALS // 2)
    kill(first)
    before = {path: path.stat().st_mtime_ns for path in multirun.glob("*/*/summary.json")}
    assert forked.command("run", *STUDY, folder=tmp_path).wait() == 0
    [sweep] = multirun.iterdir()
    trials = optuna.load_study(study_name=None, storage=f"sqlite:///{sweep / 'study.db'}").trials
    assert [trial.number for trial in trials] == list(range(NUM_TRIALS))
    assert {trial.state.name for trial in trials} <= {"COMPLETE", "PRUNED"}
    assert len({tuple(sorted(trial.params.items())) for trial in trials}) == NUM_TRIALS
    rows = list(csv.DictReader((sweep / "sweep.csv").read_text().splitlines()))
    assert [row["job"] for row in rows] == [str(number) for number in range(NUM_TRIALS)]
    assert {row["status"] for row in rows} == {"finished"}
    # What had ended before the kill was not run again; two jobs were at the moment of writing, at most.
    assert sum(path.stat().st_mtime_ns == written for path, written in before.items()) >= len(before) - 2
