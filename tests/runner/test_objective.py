"""What a run is judged by: best checkpoint, early stopping and schedulers, with objectives that are NaN too."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR, OneCycleLR, ReduceLROnPlateau, SequentialLR, StepLR

from mlotool.core.errors import ConfigError
from mlotool.runner import RunResult
from mlotool.runner.checkpoint import read_checkpoint
from mlotool.runner.evaluation import Evaluator
from tests.runner.test_run_config import read_metrics, read_summary

Run = Callable[..., RunResult]
NAN, INF = math.nan, math.inf
ERROR = {"objective": "val/cross_entropy", "evaluate.splits": {"val": 5}}


def logged(folder: Path, key: str) -> dict[int, float]:
    return {tick: value for tick, name, value in read_metrics(folder) if name == key}


def still(parameters: Any) -> Optimizer:
    """An optimizer that changes nothing that an evaluation could see."""
    return torch.optim.SGD(parameters, lr=1e-12)


@pytest.mark.parametrize(("key", "best", "mode"), [("val/cross_entropy", min, "min"), ("val/accuracy", max, "max")])
def test_the_best_checkpoint_is_the_best_evaluation(tiny_run: Run, key: str, best: Any, mode: str) -> None:
    # The rate is so high that the classifier gets worse in the end.
    result = tiny_run({**ERROR, "runner.max_ticks": 40, "objective": key})
    values = logged(result.output_dir, key)
    assert len(set(values.values())) > 2
    tick = best(values, key=values.__getitem__)
    assert result.checkpoint is not None
    assert read_checkpoint(result.checkpoint)["tick"] == tick
    assert result.objective == pytest.approx(values[tick])
    assert read_summary(result.output_dir)["objective"] == {"key": key, "value": result.objective, "mode": mode}


def test_early_stopping_waits_for_a_smaller_error(tiny_run: Run) -> None:
    result = tiny_run({**ERROR, "runner.max_ticks": 30, "runner.early_stopping_patience": 1})
    values = list(logged(result.output_dir, "val/cross_entropy").values())
    assert values[1] < values[0]
    assert len(values) > 2


@pytest.fixture
def scripted_run(tiny_run: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run with objectives that are given, an evaluation every ten ticks."""

    def run(values: Sequence[float], changes: dict[str, Any], **settings: Any) -> RunResult:
        coming = iter(values)

        def evaluate(self: Evaluator, split: str, model: Any = None) -> dict[str, float]:
            return {f"{split}/accuracy": next(coming) if split == "val" else 0.0}

        monkeypatch.setattr(Evaluator, "evaluate", evaluate)
        return tiny_run({"runner.max_ticks": 10 * len(values), **changes}, **settings)

    return run


@pytest.mark.filterwarnings("ignore:objective. 'val/.*' is nan")
@pytest.mark.parametrize(
    ("values", "num_evaluations", "best"),
    [
        ([0.1, NAN, 0.2, 0.3], 4, 4),
        ([NAN, 0.2, 0.1, 0.3], 4, 4),
        ([0.5, NAN, NAN, 0.6], 3, 1),
        ([0.5, 0.4, NAN, 0.6], 3, 1),
        ([NAN, NAN, 0.6], 2, None),
        ([0.1, -INF, 0.2, NAN], 4, 3),
    ],
)
def test_nan_is_never_the_best_and_no_improvement(
    scripted_run: Run, values: list[float], num_evaluations: int, best: int | None
) -> None:
    result = scripted_run(values, {"runner.early_stopping_patience": 2})
    summary = read_summary(result.output_dir)
    assert (summary["status"], summary["num_ticks"]) == ("finished", 10 * num_evaluations)
    path = result.output_dir / "checkpoints" / "best.ckpt"
    assert path.exists() is (best is not None)
    if best is not None:
        assert read_checkpoint(path)["tick"] == 10 * best
        assert result.objective == values[best - 1]


@pytest.mark.filterwarnings("ignore:objective. 'val/.*' is nan")
@pytest.mark.parametrize("values", [[NAN, 0.5, NAN, 0.4, NAN], [0.5, NAN, NAN, 0.6, 0.6]])
def test_to_a_scheduler_of_evaluations_nan_is_as_bad_as_can_be(scripted_run: Run, values: list[float]) -> None:
    plain = still([torch.zeros(1, requires_grad=True)])
    settings: dict[str, Any] = {"factor": 0.5, "patience": 0, "eps": 0.0}
    control, expected = ReduceLROnPlateau(plain, "max", **settings), []
    for value in values:
        expected.append(plain.param_groups[0]["lr"])
        control.step(-INF if math.isnan(value) else value)
    scheduler = lambda optimizer: ReduceLROnPlateau(optimizer, "max", **settings)  # noqa: E731
    result = scripted_run(values, {}, optimizer=still, scheduler=scheduler, scheduler_interval="evaluation")
    rates = logged(result.output_dir, "classifier/lr")
    assert [rates[10 * number + 5] for number in range(len(values))] == expected


def warm_up(optimizer: Optimizer) -> SequentialLR:
    parts = [LinearLR(optimizer, 0.5, total_iters=5), StepLR(optimizer, 5, gamma=0.1)]
    return SequentialLR(optimizer, parts, milestones=[5])


@pytest.mark.parametrize("make", [lambda it: OneCycleLR(it, max_lr=0.2, total_steps=40), warm_up])
def test_a_scheduler_steps_with_each_optimizer_step(tiny_run: Run, make: Callable[[Optimizer], Any]) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1, momentum=0.9)
    scheduler, expected = make(optimizer), {}
    for step in range(1, 31):
        optimizer.step()
        scheduler.step()
        expected[step] = optimizer.param_groups[0]["lr"]
    rates = logged(tiny_run(scheduler=make).output_dir, "classifier/lr")
    assert rates == pytest.approx({tick: expected[tick] for tick in rates})


def test_an_ordinary_scheduler_may_step_at_evaluations(tiny_run: Run) -> None:
    scheduler = lambda optimizer: StepLR(optimizer, 1, gamma=0.5)  # noqa: E731
    rates = logged(tiny_run(scheduler=scheduler, scheduler_interval="evaluation").output_dir, "classifier/lr")
    assert rates == pytest.approx({5: 0.1, 10: 0.1, 15: 0.05, 20: 0.05, 25: 0.025, 30: 0.025})


@pytest.mark.parametrize(("interval", "config"), [("step", {}), ("evaluation", {"objective": None})])
def test_a_plateau_needs_an_objective_and_its_interval(tiny_run: Run, interval: str, config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"problems.classifier.scheduler: found (a )?ReduceLROnPlateau"):
        tiny_run(config, scheduler=ReduceLROnPlateau, scheduler_interval=interval)
