"""An Optuna sweep as it is typed, killed half-way: real jobs of mwn, two at a time."""

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import mlotool

NUM_TRIALS = 20


@pytest.mark.slow
def test_a_killed_sweep_of_twenty_jobs_is_finished(tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna")
    words = ["+recipe=mwn", "debug=fast", "logger=csv", "runner.report=false", "evaluate.splits.val=2"]
    words += ["sweep=optuna", f"sweep.num_trials={NUM_TRIALS}", "sweep.workers=2", "resume=auto"]
    words += [
        "problems.classifier.optimizer.lr=tag(log, interval(1e-3, 1e-1))",
        "problems.reweight.optimizer.lr=1e-3,1e-2",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(mlotool.__file__).parents[1])}
    command = [sys.executable, "-m", "mlotool", "run", "-m", *words]

    first = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
    multirun = tmp_path / "outputs" / "mwn" / "multirun"
    until = time.monotonic() + 1500
    while len(list(multirun.glob("*/*/summary.json"))) < NUM_TRIALS // 2:
        assert first.poll() is None
        assert time.monotonic() < until
        time.sleep(0.2)
    first.send_signal(signal.SIGKILL)
    first.wait()

    second = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert second.returncode == 0, second.stdout + second.stderr
    [sweep] = multirun.iterdir()
    study = optuna.load_study(study_name=None, storage=f"sqlite:///{sweep / 'study.db'}")
    states = {trial.state.name for trial in study.trials}
    assert states <= {"COMPLETE", "PRUNED"}
    assert [trial.number for trial in study.trials] == list(range(NUM_TRIALS))
    assert len({tuple(sorted(trial.params.items())) for trial in study.trials}) == NUM_TRIALS
    assert all(trial.intermediate_values for trial in study.trials)
    rows = list(csv.DictReader((sweep / "sweep.csv").read_text().splitlines()))
    assert [row["job"] for row in rows] == [str(number) for number in range(NUM_TRIALS)]
    assert {row["status"] for row in rows} <= {"finished", "pruned"}
    # What had ended before the kill was not run again.
    done = int(second.stderr.partition(" jobs done")[0].split()[-3])
    assert NUM_TRIALS // 2 - 2 <= done < NUM_TRIALS
    assert "best of" in (sweep / "sweep.html").read_text()
