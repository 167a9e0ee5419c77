"""A user's own code in a run: what it is given, its trust, and that a rehearsal of it leaves no trace."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

import mlotool
from mlotool.config import trusted
from mlotool.core import user_code
from mlotool.core.errors import ConfigError
from mlotool.runner.checkpoint import STATE_KEY, read_whole_checkpoint
from mlotool.runner.session import Session
from tests.cli.conftest import Call
from tests.cli.user_package import write_package

Run = Callable[..., mlotool.RunResult]
CLASSIFIER = "problems.classifier."


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with mypackage/ and mine.yaml, as the working directory."""
    folder = tmp_path_factory.mktemp("user")
    write_package(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", [*sys.path, str(folder)])
        patch.setattr(trusted, "_packages", {})
        patch.setattr(user_code, "_packages", set())
        yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "mypackage"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def config(package: Path) -> Any:
    return mlotool.compose("mine.yaml", trust=["mypackage"])


@pytest.fixture
def run(config: Any, tmp_path: Path) -> Run:
    """Run the recipe with changes, in a folder of its own."""

    def run(changes: dict[str, Any], folder: str = "run", **options: Any) -> mlotool.RunResult:
        changed = config.copy()
        for key, value in changes.items():
            OmegaConf.update(changed, key, value, merge=False, force_add=True)
        return mlotool.run(changed, output_dir=tmp_path / folder, **options)

    return run


def _data(name: str, **more: Any) -> dict[str, Any]:
    return {"data": {"_target_": f"mypackage.data.{name}"}, **more}


def _module(name: str, **settings: Any) -> dict[str, Any]:
    return {f"{CLASSIFIER}module": {"_target_": f"mypackage.models.{name}", **settings}}


def _metric(name: str) -> dict[str, Any]:
    return {"evaluate.metrics": ["accuracy", {"_target_": f"mypackage.metrics.{name}"}]}


def test_pairs_are_read_as_input_and_target(run: Run) -> None:
    expected = run(_data("Data"), "dicts").metrics
    found = run(_data("Pairs"), "pairs").metrics
    assert found == expected


def test_a_rehearsal_leaves_no_trace(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {**_module("Normed"), "runner.max_ticks": 3}
    rehearsed = run(changes, "rehearsed")
    monkeypatch.setattr(Session, "rehearse", lambda self: None)
    plain = run(changes, "plain")
    assert rehearsed.metrics == plain.metrics
    states = [
        read_whole_checkpoint(each.output_dir / "checkpoints/last.ckpt")[STATE_KEY] for each in (rehearsed, plain)
    ]
    first, second = (state["program"]["classifier"]["module"] for state in states)
    assert all(torch.equal(first[key], second[key]) for key in first) and "norm.running_mean" in first
    randoms = [state["random_states"][0]["torch"] for state in states]
    assert torch.equal(*randoms)


def test_modules_that_get_their_shape_in_the_first_call_are_left_to_it(run: Run) -> None:
    assert run(_module("Lazy")).metrics["val/accuracy"] >= 0


def test_a_metric_of_the_users_all_the_way(
    call: Call, run: Run, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(package)
    metrics = [{"_target_": "mypackage.metrics.top", "k": 3}, {"_target_": "mypackage.metrics.modes"}]
    changes = {"evaluate.metrics": metrics, "objective": "val/top3", "objective_mode": "max"}
    done = run(changes)
    assert done.objective == done.metrics["val/top3"] and done.metrics["val/gradient"] == 0
    folder = str(done.output_dir)
    resumed = run({**changes, "runner.max_ticks": 4}, resume=done.output_dir)
    assert resumed.metrics == run({**changes, "runner.max_ticks": 4}, "whole").metrics
    assert call("report", folder)[0] == 0
    words = ["evaluate", folder, "--split", "val", "--checkpoint", "last"]
    monkeypatch.setattr(trusted, "_packages", {})
    code, _, err = call(*words)
    assert code == 2
    assert "evaluate.metrics[0]._target_: found 'mypackage.metrics.top', which is not trusted" in err
    assert "--trust mypackage" in err
    with pytest.raises(ConfigError, match=r"trust=\['mypackage'\]"):
        mlotool.load(folder, "classifier")
    code, out, _ = call(*words, "--trust", "mypackage")
    assert code == 0 and f"val/top3 {resumed.metrics['val/top3']:.6g}" in out
    monkeypatch.setattr(trusted, "_packages", {})
    assert type(mlotool.load(folder, "classifier", trust=["mypackage"])).__name__ == "Net"


def test_an_objective_of_the_users_needs_a_direction(run: Run) -> None:
    changes = {**_metric("top"), "objective": "val/top2", "objective_mode": None}
    with pytest.raises(ConfigError, match=r"objective_mode: found nothing for objective=val/top2"):
        run(changes)


def test_trust_from_python(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trusted, "_packages", {})
    config = mlotool.compose("mine.yaml")
    with pytest.raises(ConfigError, match=r"For code of yours: trust=\['mypackage'\]"):
        mlotool.run(config)
    with pytest.raises(ConfigError, match=r"Write trust=\['mypackage'\]"):
        mlotool.compose("mine.yaml", trust="mypackage")
    mlotool.run(mlotool.compose("mine.yaml", trust=["mypackage"]), output_dir=package / "trusted")
    provenance = (package / "trusted" / "provenance.json").read_text()
    assert "trust=['mypackage']" in provenance


@pytest.mark.slow
def test_several_ranks_say_the_same(run: Run) -> None:
    alone = run({**_metric("top"), f"{CLASSIFIER}stream.drop_last": True}, "alone").metrics
    together = run({**_metric("top"), "runner.devices": 2}, "together").metrics
    assert together == pytest.approx(alone)
    with pytest.raises(ConfigError, match=r", in forward"):
        run({**_module("Net", inputs=10), "runner.devices": 2}, "wrong")
