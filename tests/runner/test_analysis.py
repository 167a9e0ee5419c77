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


def _fails_from(call: int, size: int = 10**9) -> Callable[..., dict[str, float]]:
    """Return an analysis that fails from its n-th call on, or where it gets fewer samples than `size`."""
    calls = []

    def analysis(batches: Any, *, model: Any) -> dict[str, float]:
        calls.append(sum(len(batch["target"]) for batch in batches))
        if len(calls) >= call or calls[-1] < size < 10**9:
            raise ValueError("no use")
        return {"calls": float(len(calls))}

    return analysis


UNUSABLE: dict[str, Any] = {
    "ZeroDivisionError": lambda batches, *, model: 1 / 0,
    "threshold": lambda batches, *, model, threshold: {},
    "KeyError": lambda batches, *, model: {"x": [batch["label"] for batch in batches]},
    "returned a float": lambda batches, *, model: 3.0,
    "the name 'a/b'": lambda batches, *, model: {"a/b": 1.0},
    "returned a tensor of shape () as 'x'": lambda batches, *, model: {"x": torch.tensor(1j)},
}


@pytest.mark.parametrize("message", UNUSABLE)
def test_what_cannot_work_is_told_before_the_first_tick(
    tiny_run: Callable[..., Any], tmp_path: Path, message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        tiny_run(analyses={"look": _Analysis(UNUSABLE[message], {"model": "classifier"})})
    assert str(caught.value).startswith("analyses.look: ")
    assert not (tmp_path / "run").exists()


def test_one_that_needs_more_samples_gets_all(tiny_run: Callable[..., Any]) -> None:
    result = tiny_run(
        {"runner.max_ticks": 2},
        analyses={"look": _Analysis(_fails_from(9, size=NUM_REHEARSED + 1), {"model": "classifier"})},
    )
    assert result.metrics["look/calls"] == 3.0


def test_a_failure_at_the_end_loses_nothing_else(tiny_run: Callable[..., Any], tmp_path: Path) -> None:
    made = {"bad": _fails_from(2), "good": _fails_from(9), "worse": _fails_from(2)}
    analyses = {name: _Analysis(function, {"model": "classifier"}) for name, function in made.items()}
    with pytest.raises(
        RunError, match=r"After tick 4: analyses\.bad: .*: ValueError: no use.*resume=auto: the run is kept"
    ):
        tiny_run({"runner.max_ticks": 4}, analyses=analyses)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["status"], summary["num_ticks"]) == ("failed", 4)
    assert summary["metrics"]["good/calls"] == 2.0
    assert (tmp_path / "run/checkpoints/last.ckpt").is_file()
    whole = {name: _Analysis(_fails_from(9), {"model": "classifier"}) for name in made}
    result = tiny_run({"runner.max_ticks": 4}, analyses=whole, resume=tmp_path / "run")
    assert result.metrics["bad/calls"] == 1.0
