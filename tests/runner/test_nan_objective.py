"""An objective that is NaN counts as no improvement, and ends nothing."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from mlotool.runner import RunResult
from mlotool.runner.checkpoint import read_checkpoint
from mlotool.runner.evaluation import Evaluator
from tests.runner.test_run_config import read_metrics, read_summary

Run = Callable[..., RunResult]
NAN, INF = math.nan, math.inf

pytestmark = pytest.mark.filterwarnings("ignore:objective. 'val/.*' is nan")


@pytest.fixture
def scripted_run(tiny_run: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run with objectives that are given, an evaluation every ten ticks."""

    def run(values: Sequence[float], changes: dict[str, Any], **settings: Any) -> RunResult:
        coming = iter(values)
        found = {"val": lambda: next(coming), "test": lambda: 0.0}
        monkeypatch.setattr(
            Evaluator, "evaluate", lambda self, split, model=None: {f"{split}/accuracy": found[split]()}
        )
        return tiny_run({"runner.max_ticks": 10 * len(values), **changes}, **settings)

    return run


@pytest.mark.parametrize(
    ("values", "mode", "num_evaluations", "best"),
    [
        ([0.1, NAN, 0.2, 0.3], "max", 4, 4),
        ([NAN, 0.2, 0.1, 0.3], "max", 4, 4),
        ([0.5, NAN, NAN, 0.6], "max", 3, 1),
        ([0.5, NAN, 0.4, 0.6], "max", 3, 1),
        ([0.5, 0.4, NAN, 0.6], "max", 3, 1),
        ([NAN, NAN, 0.6], "max", 2, None),
        ([0.1, -INF, 0.2, NAN], "max", 4, 3),
    ],
)
def test_early_stopping_and_the_best_checkpoint(
    scripted_run: Run, values: list[float], mode: str, num_evaluations: int, best: int | None
) -> None:
    result = scripted_run(values, {"runner.early_stopping_patience": 2})
    summary = read_summary(result.output_dir)
    assert (summary["status"], summary["num_ticks"]) == ("finished", 10 * num_evaluations)
    path = result.output_dir / "checkpoints" / "best.ckpt"
    assert path.exists() is (best is not None)
    if best is not None:
        assert read_checkpoint(path)["tick"] == 10 * best
        assert result.objective == values[best - 1]


@pytest.mark.parametrize("values", [[NAN, 0.5, NAN, 0.4, NAN], [0.5, NAN, NAN, 0.6, 0.6]])
def test_a_scheduler_of_evaluations(scripted_run: Run, values: list[float]) -> None:
    parameter = torch.zeros(1, requires_grad=True)
    plain = torch.optim.SGD([parameter], lr=1e-12)
    settings: dict[str, Any] = {"factor": 0.5, "patience": 0, "eps": 0.0}
    control, expected = ReduceLROnPlateau(plain, "max", **settings), []
    for value in values:
        expected.append(plain.param_groups[0]["lr"])
        # To a scheduler it is as bad as can be.
        control.step(-INF if math.isnan(value) else value)
    result = scripted_run(
        values,
        {},
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-12),
        scheduler=lambda optimizer: ReduceLROnPlateau(optimizer, "max", **settings),
        scheduler_interval="evaluation",
    )
    rates = {tick: value for tick, key, value in read_metrics(result.output_dir) if key == "classifier/lr"}
    assert [rates[10 * number + 5] for number in range(len(values))] == expected
