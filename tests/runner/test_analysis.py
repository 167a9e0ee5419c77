import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from mlotool import Identity, Implicit
from mlotool.core.errors import ConfigError, RunError
from mlotool.data import Digits
from mlotool.program import Graph, Problem, Program
from mlotool.runner.evaluation import NUM_REHEARSED, run_analyses


@dataclass
class _Analysis:
    function: Any
    roles: dict[str, str] = field(default_factory=lambda: {"model": "line"})
    split: str = "val"
    batch_size: int = 3


def _found(batches: Any, *, model: Any) -> dict[str, torch.Tensor | str]:
    target = torch.cat([batch["target"] for batch in batches])
    assert not torch.is_grad_enabled()
    return {"target": target, "count": torch.tensor(len(target)), "name": "kept as it is"}


def test_arrays_texts_and_numbers_go_their_ways(tmp_path: Path) -> None:
    problem = Problem("line", torch.nn.Linear(1, 1), lambda batch, *, model: model(batch), roles={"model": "line"})
    data = Digits({"val": 5})
    numbers: dict[str, float] = {}
    built = SimpleNamespace(analyses={"look": _Analysis(_found)}, program=Program([problem], Graph()), data=data)
    run_analyses(built, tmp_path, "cpu", numbers.update)
    assert numbers == {"look/count": 5.0}
    assert (tmp_path / "look_name.txt").read_text() == "kept as it is\n"
    with numpy.load(tmp_path / "look.npz") as arrays:
        assert arrays["target"].tolist() == data.split("val").target.tolist()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["look.npz", "look_name.txt"]


def _weights(values: list[float], num_steps: int, folder: Path) -> None:
    problem = Problem("line", torch.nn.Linear(1, 1), lambda batch, *, other: other(batch), roles={"other": "other"})
    lower = Problem(
        "other",
        torch.nn.Linear(1, 1),
        lambda batch, *, model, line: model(batch) * line(batch),
        roles={"model": "other", "line": "line"},
        hypergradient=Implicit(Identity()),
    )
    graph = Graph(upper_to_lower={"line": ["other"]}, lower_to_upper={"other": ["line"]})
    problem.num_steps = num_steps
    analysis = _Analysis(lambda batches, *, model: {"weight": torch.tensor(values)})
    program, data = Program([problem, lower], graph), Digits({"val": 5})
    run_analyses(SimpleNamespace(analyses={"look": analysis}, program=program, data=data), folder, "cpu", dict)


@pytest.mark.parametrize("values", [[0.998, 1.0, 0.999], [-2.0, -2.01], [0.0, 0.0, 0.0]])
def test_weights_that_are_all_about_the_same_are_told(values: list[float], tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=rf"analyses\.look: all {len(values)} weights .* within 1% of each other"):
        _weights(values, 100, tmp_path)


@pytest.mark.parametrize(
    ("values", "num_steps"),
    [([0.98, 1.0], 100), ([0.7, 0.7], 99), ([0.5], 100), ([-1e-9, 1e-9], 100), ([0.0, 1.0], 100)],
)
def test_weights_that_differ_or_have_just_begun_are_not(values: list[float], num_steps: int, tmp_path: Path) -> None:
    _weights(values, num_steps, tmp_path)


def _fails_from(call: int, size: int = 10**9) -> Callable[..., dict[str, float]]:
    """Return an analysis that fails from its n-th call on, or where it gets fewer samples than `size`."""
    calls = []

    def analysis(batches: Any, *, model: Any) -> dict[str, float]:
        calls.append(sum(len(batch["target"]) for batch in batches))
        if len(calls) >= call or calls[-1] < size < 10**9:
            raise ValueError("no use")
        return {"calls": float(len(calls))}

    return analysis


def _asks_for_more(batches: Any, *, model: Any, threshold: float) -> dict[str, float]:
    return {"threshold": threshold}


UNUSABLE: dict[str, tuple[Any, str]] = {
    "raises": (lambda batches, *, model: 1 / 0, "ZeroDivisionError"),
    "an argument": (_asks_for_more, "threshold"),
    "a role": (lambda batches, *, net: {}, "model"),
    "a key of the batch": (lambda batches, *, model: {"x": [each["label"] for each in batches]}, "KeyError"),
    "no mapping": (lambda batches, *, model: 3.0, "returned a float"),
    "a name": (lambda batches, *, model: {"a/b": 1.0}, "the name 'a/b'"),
    "a value": (lambda batches, *, model: {"x": torch.tensor(1j)}, "returned a tensor of shape () as 'x'"),
    "a shape": (lambda batches, *, model: {"x": [model(torch.ones(99)) for _ in batches]}, "RuntimeError"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_what_cannot_work_is_told_before_the_first_tick(
    tiny_run: Callable[..., Any], tmp_path: Path, name: str
) -> None:
    function, message = UNUSABLE[name]
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        tiny_run(analyses={"look": _Analysis(function, {"model": "classifier"})})
    assert str(caught.value).startswith("analyses.look: ")
    assert not (tmp_path / "run").exists()


def test_one_that_needs_more_samples_gets_all(tiny_run: Callable[..., Any]) -> None:
    result = tiny_run(
        {"runner.max_ticks": 2},
        analyses={"look": _Analysis(_fails_from(9, size=NUM_REHEARSED + 1), {"model": "classifier"})},
    )
    assert result.metrics["look/calls"] == 3.0


@pytest.mark.parametrize("order", [("good", "bad"), ("bad", "good", "worse")])
def test_a_failure_at_the_end_loses_nothing_else(
    tiny_run: Callable[..., Any], tmp_path: Path, order: tuple[str, ...]
) -> None:
    made = {"good": _fails_from(9), "bad": _fails_from(2), "worse": _fails_from(2)}
    analyses = {name: _Analysis(made[name], {"model": "classifier"}) for name in order}
    with pytest.raises(
        RunError, match=r"After tick 4: analyses\.bad: .*: ValueError: no use.*resume=auto: the run is kept"
    ):
        tiny_run({"runner.max_ticks": 4}, analyses=analyses)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["status"], summary["num_ticks"]) == ("failed", 4)
    assert summary["metrics"].get("good/calls") == (2.0 if "good" in order else None)
    assert (tmp_path / "run/checkpoints/last.ckpt").is_file()
    whole = {name: _Analysis(_fails_from(9), {"model": "classifier"}) for name in order}
    result = tiny_run({"runner.max_ticks": 4}, analyses=whole, resume=tmp_path / "run")
    assert result.metrics["bad/calls"] == 1.0
