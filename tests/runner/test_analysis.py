from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch

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
