"""Mistakes in a user's own code: one message, before the first tick wherever it can be known."""

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
from mlotool.core.user_code import UserCodeError
from mlotool.runner.checkpoint import STATE_KEY, read_whole_checkpoint
from mlotool.runner.session import Session
from tests.cli.conftest import Result
from tests.cli.user_package import write_package

Call = Callable[..., Result]
Run = Callable[..., mlotool.RunResult]
CLASSIFIER = "problems.classifier."
BATCH = "batch = {input: float32 (8, 1, 8, 8), target: int64 (8,)"


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


def _loss(name: str) -> dict[str, Any]:
    return {f"{CLASSIFIER}loss._target_": f"mypackage.losses.{name}"}


def _data(name: str, **more: Any) -> dict[str, Any]:
    return {"data": {"_target_": f"mypackage.data.{name}"}, **more}


def _module(name: str, **settings: Any) -> dict[str, Any]:
    return {f"{CLASSIFIER}module": {"_target_": f"mypackage.models.{name}", **settings}}


def _metric(name: str) -> dict[str, Any]:
    return {"evaluate.metrics": ["accuracy", {"_target_": f"mypackage.metrics.{name}"}]}


ONE_NUMBER = "expected a 0-D tensor"
BEFORE = {
    "analysis": (
        {"analyses.a": {"_target_": "mypackage.analyses.failing", "roles": {"model": "classifier"}, "split": "val"}},
        ["analyses.a: mypackage.analyses.failing (mypackage/analyses.py", "LookupError"],
    ),
    "inputs": (_module("Net", inputs=10), [", in forward", "8x64 and 10x10", BATCH]),
    "classes": (_module("Net", outputs=3), ["Target", "out of bounds", "from 2 to 9"]),
    "vector": (_loss("vector"), ["losses.vector (mypackage/losses.py", "shape (8,)", ONE_NUMBER, BATCH]),
    "None": (_loss("nothing"), ["returned None", ONE_NUMBER]),
    "integer": (_loss("integer"), ["a tensor without a gradient", "parameters of 'classifier'", "argmax"]),
    "in place": (_loss("in_place"), ["has changed the parameter 'layer.weight' of 'classifier'", "pure function"]),
    "wrong key": (_loss("wrong_key"), ["KeyError: 'image'", "losses.py, line", BATCH]),
    "metric of a loss": (_loss("bad_metric"), ["(8,) as the metric 'right'", "0-D tensors as metrics"]),
    "no role": (_loss("no_role"), ["unknown role 'model'", "of none"]),
    "by position": (_loss("positional"), ["unknown role 'model'", "Write a * before it: def f(batch, *, model)"]),
    "role not given": (_loss("weighted"), ["loss.weigher: missing", "loss.roles.weigher: <problem> if it is a module"]),
    "no function": (_loss("no_such"), ["'mypackage.losses.no_such', which is nothing callable"]),
    "float targets": (_data("FloatTargets"), ["target: float32 (8,)", "Correct the loss"]),
    "NaN": (_data("NotANumber"), ["nan before the first step", "input: float32 (8, 1, 8, 8), not all finite"]),
    "other keys": (_data("OtherKeys"), ["KeyError: 'input'", "batch = {image: float32", "label: int64"]),
    "no target in val": (
        _data("OtherVal"),
        ["evaluate.problem", "KeyError: 'target'", "a batch with input and target"],
    ),
    "no splits": (_data("NoSplits"), ["data.NoSplits (mypackage/data.py, line", "has no splits", "split(name)"]),
    "split fails": (_data("SplitFails"), ["in split: FileNotFoundError: no folder images/train", "split = 'train'"]),
    "empty val": (_data("EmptyVal"), ["the split 'val' has 0 samples"]),
    "iterable": (_data("Iterable"), ["class Endless, without __len__", "map-style"]),
    "item": (
        _data("ItemFails"),
        ["in __getitem__: AttributeError", "index = ", "data: mypackage.data.ItemFails.split"],
    ),
    "shapes": (
        _data("Unequal"),
        ["a sample = {input: float32 (1, 8,", "another one = {input:", "tensors of one shape"],
    ),
    "objects": (_data("Objects"), ["input: an object"]),
    "no parameters": (_module("NoParameters"), ["NoParameters has no parameter that requires a gradient"]),
    "module constructor": (_module("BadConstructor"), ["models.py", ", in __init__: AttributeError"]),
    "syntax": ({f"{CLASSIFIER}loss._target_": "mypackage.broken.loss"}, ["mypackage/broken.py", "SyntaxError"]),
    "import": ({f"{CLASSIFIER}loss._target_": "mypackage.importing.loss"}, ["importing.py, line", "no_such_module"]),
    "scheduler": (
        {f"{CLASSIFIER}scheduler": {"_target_": "mypackage.optim.BadScheduler", "every": 0}},
        ["optim.py", ", in __init__: ZeroDivisionError"],
    ),
    "metric's shape": (_metric("square"), ["(3, 3) as 'square' for 16 samples", "shape () or (16,)"]),
    "metric fails": (_metric("failing"), ["evaluate.metrics[1]", "metrics.py, line", "KeyError: 'picture'"]),
    "metric's key": (
        {**_metric("top"), "objective": "val/top3", "objective_mode": "max"},
        ["found 'val/top3'", "val/top2"],
    ),
}


@pytest.mark.parametrize("mistake", BEFORE)
def test_a_mistake_is_one_message_before_the_first_tick(run: Run, tmp_path: Path, mistake: str) -> None:
    changes, parts = BEFORE[mistake]
    with pytest.raises(ConfigError) as caught:
        run(changes)
    text = str(caught.value)
    assert [part for part in parts if part not in text] == [], text
    assert len(text.splitlines()) == 1
    assert not (tmp_path / "run").exists()


DURING = {
    "loss": (
        {**_loss("third_time"), "runner.max_ticks": 9},
        ["problems.classifier.loss", "RuntimeError: the third time"],
    ),
    "sample": (
        _data("ItemFailsLater", **{f"{CLASSIFIER}stream.shuffle": False, "runner.max_ticks": 9}),
        ["After tick 4: data: mypackage.data.ItemFailsLater", "in __getitem__: ValueError: sample 39 is broken"],
    ),
    "optimizer": (
        {f"{CLASSIFIER}optimizer": {"_target_": "mypackage.optim.StepFails"}},
        ["After tick 0: problems.classifier: its step failed at mypackage/optim.py"],
    ),
    "scheduler": (
        {f"{CLASSIFIER}scheduler": {"_target_": "mypackage.optim.SchedulerFails"}},
        [
            "problems.classifier.scheduler: mypackage.optim.SchedulerFails (mypackage/optim.py",
            ", in get_lr: KeyError: 'rate'",
        ],
    ),
}


@pytest.mark.parametrize("mistake", DURING)
def test_a_mistake_that_shows_in_training_is_one_message(run: Run, tmp_path: Path, mistake: str) -> None:
    changes, parts = DURING[mistake]
    with pytest.raises(UserCodeError) as caught:
        run(changes)
    text = str(caught.value)
    assert [part for part in parts if part not in text] == [], text
    assert caught.value.exit_code == 1
    assert caught.value.__cause__ is not None
    assert caught.value.run_dir == tmp_path / "run"


def test_a_sample_that_fails_in_a_loading_process_is_the_same_message(run: Run) -> None:
    with pytest.raises(ConfigError, match=r"data: mypackage.data.ItemFails.*in __getitem__: AttributeError") as caught:
        run(_data("ItemFails", **{f"{CLASSIFIER}stream.num_workers": 1}))
    assert "Traceback" not in str(caught.value)


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
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert "norm.running_mean" in first
    randoms = [state["random_states"][0]["torch"] for state in states]
    assert torch.equal(*randoms)


def test_modules_that_get_their_shape_in_the_first_call_are_left_to_it(run: Run) -> None:
    assert run(_module("Lazy")).metrics["val/accuracy"] >= 0


def test_on_the_command_line(call: Call, package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(package)
    words = ["run", "mine.yaml", "--trust", "mypackage"]
    code, _, err = call(*words, f"{CLASSIFIER}loss._target_=mypackage.losses.wrong_key")
    assert code == 2
    assert ", in wrong_key: KeyError: 'image'" in err
    assert "not foreseen" not in err
    assert not list(package.glob("outputs/mine/*"))
    code, _, err = call(*words, f"{CLASSIFIER}optimizer={{_target_: mypackage.optim.StepFails}}")
    assert code == 1
    assert "ZeroDivisionError: no step" in err
    assert "not foreseen" not in err


def test_a_metric_of_the_users_all_the_way(
    call: Call, run: Run, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(package)
    metrics = [{"_target_": "mypackage.metrics.top", "k": 3}, {"_target_": "mypackage.metrics.modes"}]
    changes = {"evaluate.metrics": metrics, "objective": "val/top3", "objective_mode": "max"}
    done = run(changes)
    assert done.objective == done.metrics["val/top3"]
    assert done.metrics["val/gradient"] == 0
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
    assert code == 0
    assert f"val/top3 {resumed.metrics['val/top3']:.6g}" in out
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
