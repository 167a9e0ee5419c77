"""A search of a model space as it is typed, and one model of the space."""

import re
from pathlib import Path
from typing import Any

import pytest

import mlotool
from mlotool.cli.main import main
from mlotool.folders.safe_files import read_json
from tests.cli.small_space import small_space

pytest.importorskip("optuna")

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


def statuses_of(sweep: Path) -> dict[int, str]:
    """Return how each job has ended, of those that have a summary."""
    return {int(each.parent.name): summary_of(each.parent)["status"] for each in sweep.glob("*/summary.json")}


def test_trials_are_runs_and_a_candidate_that_refuses_its_place_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(small_space(*SPACE, sampler="brute_force"))
    fixed = ["decisions.activation_0=relu", "decisions.activation_1=tanh", "runner.max_ticks=1"]
    assert main(["run", "-m", "+recipe=small.yaml", *fixed, "sweep.num_trials=9", "sweep.fuse=4"]) == 0
    sweep, reasons = only_sweep(), {"wrong": "does not accept its input ((b, 7))", "odd": "candidates.odd"}
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
    assert "mutator 'norm': node 'layers.3' does not accept" in capsys.readouterr().err
