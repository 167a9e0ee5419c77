"""`resume=` as it is typed: exit codes, the line that says how to go on, and sweeps."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import mlotool
from tests.cli.conftest import Call, Recipe

WORDS = ["+recipe=mwn", "logger=csv", "debug=fast", "runner.progress_bar=false", "runner.report=false"]


def test_a_run_goes_on_and_hydras_empty_folder_goes(call: Call, tmp_path: Path) -> None:
    code, _, err = call("run", *WORDS, "debug.limit_ticks=2", "resume=auto")
    assert (code, "A new run begins" in err) == (0, True)
    [folder] = (tmp_path / "outputs/mwn").iterdir()
    assert "resume=" not in (folder / "overrides.txt").read_text()
    code, out, err = call("run", *WORDS, "debug.limit_ticks=4", "resume=auto")
    assert (code, "after tick 2" in err, folder.name in out) == (0, True, True)
    assert list((tmp_path / "outputs/mwn").iterdir()) == [folder]
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    code, out, err = call("run", *WORDS, "debug.limit_ticks=4", f"resume={folder}")
    assert (code, "nothing is changed" in err, folder.name in out) == (0, True, True)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert call("run", *WORDS, "seed=7", f"resume={folder}")[0] == 2
    code, _, err = call("run", *WORDS, "resum=auto")
    assert (code, "resume" in err) == (2, True)


def test_what_is_wrong_is_told(call: Call, recipe: Recipe) -> None:
    code, _, err = call("run", str(recipe("resume: /somewhere")))
    assert code == 2 and "found the key 'resume'; expected it on the command line alone" in err
    code, _, err = call("run", *WORDS, "runner.checkpoint_seconds=0", "runner.keep_checkpoints=0")
    assert code == 2 and "runner.checkpoint_seconds: found" in err
    assert "runner.keep_checkpoints: found 0; expected a whole number of at least 1" in err


@pytest.mark.slow
@pytest.mark.parametrize("is_sweep", [False, True])
def test_sigterm_and_what_it_says_to_type(tmp_path: Path, is_sweep: bool) -> None:
    words = ["run", *(["-m", "seed=0,1"] if is_sweep else []), *WORDS, "debug=off", "runner.max_ticks=150"]
    environment = {**os.environ, "PYTHONPATH": str(Path(mlotool.__file__).parents[1])}
    command = [sys.executable, "-m", "mlotool", *words]

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *more], capture_output=True, text=True, cwd=tmp_path, env=environment)

    folder = "outputs/mwn/multirun/*/1" if is_sweep else "outputs/mwn/*"
    pattern = f"{folder}/checkpoints/last.ckpt"
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment) as process:
        try:
            while process.poll() is None and not any(tmp_path.glob(pattern)):
                time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            _, err = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 143
    [line] = [line for line in err.splitlines() if line.startswith("mlotool: go on with: mlotool run ")]
    resume = line.split()[-1]
    done = run(resume)
    assert done.returncode == 0, done.stderr
    [resumed] = tmp_path.glob(folder)
    whole = subprocess.run(
        [sys.executable, "-m", "mlotool", "run", *WORDS, "debug=off", "runner.max_ticks=150", f"seed={int(is_sweep)}",
         "hydra.run.dir=whole"],
        capture_output=True, text=True, cwd=tmp_path, env=environment,
    )  # fmt: skip
    assert whole.returncode == 0, whole.stderr
    assert (resumed / "metrics.csv").read_bytes() == (tmp_path / "whole/metrics.csv").read_bytes()
