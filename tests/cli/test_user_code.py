"""A user's own code in a run: what it is given, its trust, and that a rehearsal of it leaves no trace."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import mlotool
from mlotool.config.security import trusted
from mlotool.core import user_code
from mlotool.core.errors import ConfigError
from tests.cli.conftest import Call
from tests.cli.user_package import write_package

Run = Callable[..., mlotool.RunResult]
CLASSIFIER = "problems.classifier."
MODULE, TOP = f"{CLASSIFIER}module", ["accuracy", {"_target_": "mypackage.metrics.top"}]


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


def test_pairs_are_read_as_input_and_target(run: Run) -> None:
    dicts, pairs = (run({"data": {"_target_": f"mypackage.data.{name}"}}, name).metrics for name in ("Data", "Pairs"))
    assert dicts == pairs


def test_modules_that_get_their_shape_in_the_first_call_are_left_to_it(run: Run) -> None:
    assert run({MODULE: {"_target_": "mypackage.models.Lazy"}}).metrics["val/accuracy"] >= 0


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
    assert "found 5 targets of the package 'mypackage', which is not trusted (data, " in err
    assert "--trust mypackage" in err
    with pytest.raises(ConfigError, match=r"trust=\['mypackage'\]"):
        mlotool.load(folder, "classifier")
    code, out, _ = call(*words, "--trust", "mypackage")
    assert code == 0 and f"val/top3 {resumed.metrics['val/top3']:.6g}" in out
    monkeypatch.setattr(trusted, "_packages", {})
    assert type(mlotool.load(folder, "classifier", trust=["mypackage"])).__name__ == "Net"


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
    alone = run({"evaluate.metrics": TOP, f"{CLASSIFIER}stream.drop_last": True}, "alone").metrics
    together = run({"evaluate.metrics": TOP, "runner.devices": 2}, "together").metrics
    assert together == pytest.approx(alone)
    with pytest.raises(ConfigError, match=r", in forward"):
        run({MODULE: {"_target_": "mypackage.models.Net", "inputs": 10}, "runner.devices": 2}, "wrong")
