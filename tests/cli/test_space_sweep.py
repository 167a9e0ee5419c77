"""A search of a model space as it is typed: drawn, trained, killed again and again, and the best model built again."""

import random
import re
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import mlotool
from mlotool.cli.main import main
from mlotool.core.run_files import read_json
from tests import forked
from tests.cli.small_space import small_space
from tests.cli.test_sweep import wait_until

optuna = pytest.importorskip("optuna")

SPACE = (
    "relu: null, "
    + ", ".join(f"{name.lower()}: {{_target_: torch.nn.{name}}}" for name in ("Tanh", "SiLU", "GELU", "ELU")),
    "none: null, layer: {_target_: torch.nn.LayerNorm}, wrong: {_target_: torch.nn.Linear, out_features: 7}, "
    "odd: {_target_: torch.nn.GroupNorm, num_groups: 3}",
)
RECIPE = small_space(*SPACE)


def only_sweep() -> Path:
    [sweep] = Path("outputs/small/multirun").iterdir()
    return sweep


def summary_of(folder: Path) -> dict[str, Any]:
    found = read_json(folder, "summary.json")
    assert found is not None
    return found


def test_trials_are_runs_and_a_candidate_that_refuses_its_place_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(small_space(*SPACE, sampler="brute_force"))
    fixed = ["decisions.activation_0=relu", "decisions.activation_1=tanh", "runner.max_ticks=1"]
    assert main(["run", "-m", "+recipe=small.yaml", *fixed, "sweep.num_trials=9", "sweep.fuse=4"]) == 0
    sweep, reasons = only_sweep(), {"wrong": "does not take what it is given ((b, 7))", "odd": "candidates.odd"}
    assert sorted(statuses_of(sweep).values()) == ["finished", "finished", "infeasible", "infeasible"]
    for number in range(4):
        summary, listed = summary_of(sweep / str(number)), (sweep / str(number) / "overrides.txt").read_text()
        [candidate] = re.findall(r"decisions\.norm_0=(\w+)", listed)
        assert (summary["status"] == "infeasible") == (candidate in reasons)
        assert candidate not in reasons or reasons[candidate] in summary["error"]
        assert (sweep / str(number) / "checkpoints").exists() == (candidate not in reasons)


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


NUM_TRIALS, NUM_KILLS = 40, 20
MOMENTS = ("plan.json", "study.db", "*/job.json", "*/checkpoints/*.ckpt", "*/summary.json")
"""Files of a sweep whose next change is when it is killed: it has taken up its trials, draws, starts jobs, trains, and
has seen a job end. Between two kills at most one process of four jobs ends, and of 20 kills 8 let it come so far."""


def written(sweep: Path, pattern: str) -> set[tuple[str, int]]:
    """Return the files of a pattern, each with when it was written."""
    found = set()
    for each in sweep.glob(pattern):
        with suppress(FileNotFoundError):
            found.add((str(each), each.stat().st_mtime_ns))
    return found


def statuses_of(sweep: Path) -> dict[int, str]:
    """Return how each job has ended, of those that have a summary."""
    return {int(each.parent.name): summary_of(each.parent)["status"] for each in sweep.glob("*/summary.json")}


def finished(sweep: Path) -> dict[int, set[tuple[str, int]]]:
    """Return when the summary of each job was written that has finished."""
    jobs = [job for job, status in statuses_of(sweep).items() if status == "finished"]
    return {job: written(sweep, f"{job}/summary.json") for job in jobs}


def wait_for(process: forked.Forked, pattern: str, before: set[tuple[str, int]]) -> Path:
    """Return the sweep once a file of a pattern is written."""
    sweeps = Path("outputs/small/multirun")
    wait_until(process, lambda: any(written(sweep, pattern) - before for sweep in sweeps.glob("*")))
    return next(sweep for sweep in sweeps.glob("*") if written(sweep, pattern) - before)


def save_state(run: Path) -> None:
    torch.save(mlotool.load(run, "classifier").state_dict(), "built.pt")


@pytest.mark.slow
def test_a_search_that_is_killed_twenty_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(RECIPE)
    command = ["run", "-m", "+recipe=small.yaml", f"sweep.num_trials={NUM_TRIALS}", "sweep.fuse=4"]
    command += ["runner.max_ticks=30", "resume=auto"]
    random_numbers, ends = random.Random(0), dict[int, set[tuple[str, int]]]()
    moments = [MOMENTS[number % len(MOMENTS)] for number in range(NUM_KILLS)]
    random_numbers.shuffle(moments)
    taken_up = set[tuple[str, int]]()
    for moment in moments:
        process = forked.command(*command, folder=tmp_path)
        sweep = wait_for(process, "plan.json", taken_up)
        taken_up = written(sweep, "plan.json")
        if moment != "plan.json":
            wait_for(process, moment, written(sweep, moment))
        time.sleep(random_numbers.uniform(0, 0.3))
        assert process.poll() is None
        process.kill()
        assert process.wait() == -signal.SIGKILL
        # It had more to do: jobs are left.
        assert len(statuses_of(sweep)) < NUM_TRIALS
        now = finished(sweep)
        assert ends.items() <= now.items()
        ends = now
    assert forked.command(*command, folder=tmp_path).wait() == 0
    sweep = only_sweep()
    assert ends and ends.items() <= finished(sweep).items()
    jobs = sorted(int(each.name) for each in sweep.iterdir() if each.name.isdigit())
    statuses = statuses_of(sweep)
    assert sorted(statuses) == jobs and len(jobs) == NUM_TRIALS
    assert set(statuses.values()) == {"finished", "infeasible"}
    trials = optuna.load_study(study_name=None, storage=f"sqlite:///{sweep / 'study.db'}").trials
    assert [each.number for each in trials] == list(range(len(trials)))
    told = {each.number: each.state.name for each in trials}
    assert all(told[job] == ("COMPLETE" if statuses[job] == "finished" else "FAIL") for job in jobs)
    assert len({tuple(sorted(trials[job].params.items())) for job in jobs}) == NUM_TRIALS
    # What has no folder has the point of a job.
    for trial in (each for each in trials if each.number not in jobs):
        assert trial.values == trials[trial.user_attrs["same_as_trial"]].values
    for job in jobs:
        listed = (sweep / str(job) / "overrides.txt").read_text().split()
        assert {f"{key}={value}" for key, value in trials[job].params.items()} <= {each.lstrip("+") for each in listed}
    best = max((job for job in jobs if statuses[job] == "finished"), key=lambda job: trials[job].value)
    trained = mlotool.load(sweep / str(best), "classifier").state_dict()
    assert forked.run(save_state, sweep / str(best), folder=tmp_path).returncode == 0
    built = torch.load("built.pt", weights_only=True)
    assert built.keys() == trained.keys()
    assert all(torch.equal(tensor, built[name]) for name, tensor in trained.items())
