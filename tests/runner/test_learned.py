"""The values of small upper problems are read as the losses see them, and training does not notice."""

import csv
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlotool import FirstOrder, Graph, Problem, Program
from mlotool.models import PositiveVector
from mlotool.runner import RunResult
from mlotool.runner.values import MAX_VALUES, LearnedValues

Run = Callable[..., RunResult]


class Noisy(nn.Module):
    """Gives something else in training mode, with random numbers and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self) -> Tensor:
        self.calls += 1
        return self.scale * torch.rand(()).clamp(0.5, 0.5) * (3.0 if self.training else 1.0)


class Table(nn.Module):
    def __init__(self, **values: float) -> None:
        super().__init__()
        self.values = nn.ParameterDict({name: nn.Parameter(torch.tensor(each)) for name, each in values.items()})

    def forward(self, index: Tensor) -> Tensor:
        return self.values["a"] * index


class Wide(Table):
    def forward(self) -> Tensor:  # type: ignore[override]
        return self.values["a"].expand(MAX_VALUES + 1)


class Broken(Table):
    def forward(self) -> Tensor:  # type: ignore[override]
        raise RuntimeError("not like that")


def one(batch: Any, *, w: Any) -> Tensor:
    raise AssertionError("no loss is evaluated")


def two(batch: Any, *, w: Any, u: Any) -> Tensor:
    raise AssertionError("no loss is evaluated")


def read(module: nn.Module) -> dict[str, float]:
    lower = Problem("w", PositiveVector(), two, roles={"w": "w", "u": "u"}, hypergradient=FirstOrder())
    upper = Problem("u", module, one, roles={"w": "w"})
    values = LearnedValues(Program([lower, upper], Graph({"u": ["w"]}, {"w": ["u"]})))
    assert values.read() == values.read()
    return values.read()


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (PositiveVector(1, initial=0.5), {"learned_value": 0.5}),
        (PositiveVector(2, initial=0.5), {"learned_value_0": 0.5, "learned_value_1": 0.5}),
        (Noisy(), {"learned_value": 1.0}),
        (Table(a=1.5, b=2.0), {"learned_values.a": 1.5, "learned_values.b": 2.0}),
        (Wide(a=1.5), {"learned_values.a": 1.5}),
        (Broken(a=1.5), {"learned_values.a": 1.5}),
        (PositiveVector(MAX_VALUES + 1), {}),
    ],
)
def test_the_value_in_use_is_read_and_else_the_parameters(module: nn.Module, expected: dict[str, float]) -> None:
    assert read(module) == pytest.approx({f"u/{key}": value for key, value in expected.items()})


def test_nothing_in_training_changes() -> None:
    module = Noisy()
    before = torch.get_rng_state()
    read(module)
    assert torch.equal(torch.get_rng_state(), before)
    assert float(module.calls) == 0  # type: ignore[arg-type]
    assert module.training


def test_a_run_logs_them_at_each_flush_and_the_norm_of_the_hypergradient(tiny_run: Run) -> None:
    result = tiny_run()
    with (result.output_dir / "metrics.csv").open(newline="") as lines:
        rows: list[dict[str, Any]] = list(csv.DictReader(lines))
    ticks = {key: [int(row["tick"]) for row in rows if row["key"] == key] for key in {row["key"] for row in rows}}
    for index in range(3):
        assert ticks[f"weights/learned_logits_{index}"] == ticks["classifier/loss"]
    assert ticks["weights/hypergradient_norm"] == ticks["weights/loss"]
    assert "classifier/hypergradient_norm" not in ticks
    assert not any(key.startswith("classifier/learned") for key in ticks)
