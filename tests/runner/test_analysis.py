from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from mlotool import Identity, Implicit
from mlotool.data import Digits
from mlotool.program import Graph, Problem, Program
from mlotool.runner.analysis import run_analyses


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
    numbers = run_analyses({"look": _Analysis(_found)}, Program([problem], Graph()), data, tmp_path)
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
    run_analyses({"look": analysis}, Program([problem, lower], graph), Digits({"val": 5}), folder)


@pytest.mark.parametrize("values", [[0.998, 1.0, 0.999], [0.7, 0.7], [1e-8, 1.009e-8], [-2.0, -2.01], [0.0, 0.0, 0.0]])
def test_weights_that_are_all_about_the_same_are_told(values: list[float], tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=rf"analyses\.look: all {len(values)} weights .* within 1% of each other"):
        _weights(values, 100, tmp_path)


@pytest.mark.parametrize(
    ("values", "num_steps"),
    [([0.98, 1.0], 100), ([0.7, 0.7], 99), ([0.5], 100), ([-1e-9, 1e-9], 100), ([0.0, 1.0], 100)],
)
def test_weights_that_differ_or_have_just_begun_are_not(values: list[float], num_steps: int, tmp_path: Path) -> None:
    _weights(values, num_steps, tmp_path)
