"""Whole runs of the tiny program: the files they leave, and how they end."""

import csv
import json
import logging
import math
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR

from mlotool import LossOutput
from mlotool.config import compose
from mlotool.core.errors import ConfigError, NonFiniteLossError, NonFiniteParametersError
from mlotool.core.user_code import UserCodeError
from mlotool.runner import RunResult, load, run
from mlotool.runner.checkpoint import read_checkpoint
from mlotool.runner.evaluation import Evaluator
from tests.runner.tiny import Analysis, lower_loss

Run = Callable[..., RunResult]

NAN, INF = math.nan, math.inf


def logged(folder: Path, key: str) -> dict[int, float]:
    return {tick: value for tick, name, value in read_metrics(folder) if name == key}


def still(parameters: Any) -> Optimizer:
    """An optimizer that changes nothing that an evaluation could see."""
    return torch.optim.SGD(parameters, lr=1e-12)


@pytest.mark.parametrize(("key", "best", "mode"), [("val/cross_entropy", min, "min"), ("val/accuracy", max, "max")])
def test_the_best_checkpoint_is_the_best_evaluation(tiny_run: Run, key: str, best: Any, mode: str) -> None:
    # The rate is so high that the classifier gets worse in the end.
    changes = {"objective": key, "evaluate.splits": {"val": 5}, "runner.max_ticks": 40}
    result = tiny_run({**changes, "runner.early_stopping_patience": 3})
    values = logged(result.output_dir, key)
    assert len(set(values.values())) > 2
    tick = best(values, key=values.__getitem__)
    assert result.checkpoint is not None
    assert read_checkpoint(result.checkpoint)["tick"] == tick
    assert result.objective == pytest.approx(values[tick])
    assert read_summary(result.output_dir)["objective"] == {"key": key, "value": result.objective, "mode": mode}
    # An evaluation every five ticks: the third one in a row without a better value is the last.
    assert max(values) == min(tick + 15, 40) > 15


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


def test_a_scheduler_steps_with_each_optimizer_step(tiny_run: Run) -> None:
    make = partial(OneCycleLR, max_lr=0.2, total_steps=30)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1, momentum=0.9)
    scheduler, expected = make(optimizer), {}
    for step in range(1, 21):
        optimizer.step()
        scheduler.step()
        expected[step] = optimizer.param_groups[0]["lr"]
    rates = logged(tiny_run(scheduler=make).output_dir, "classifier/lr")
    assert rates == pytest.approx({tick: expected[tick] for tick in rates})


def test_an_ordinary_scheduler_may_step_at_evaluations(tiny_run: Run) -> None:
    scheduler = lambda optimizer: StepLR(optimizer, 1, gamma=0.5)  # noqa: E731
    rates = logged(tiny_run(scheduler=scheduler, scheduler_interval="evaluation").output_dir, "classifier/lr")
    assert rates == pytest.approx({5: 0.1, 10: 0.1, 15: 0.05, 20: 0.05})


@pytest.mark.parametrize(("interval", "config"), [("step", {}), ("evaluation", {"objective": None})])
def test_a_plateau_needs_an_objective_and_its_interval(tiny_run: Run, interval: str, config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"problems.classifier.scheduler: found (a )?ReduceLROnPlateau"):
        tiny_run(config, scheduler=ReduceLROnPlateau, scheduler_interval=interval)


def read_metrics(run_dir: Path) -> list[tuple[int, str, float]]:
    with (run_dir / "metrics.csv").open() as file:
        return [(int(row["tick"]), row["key"], float(row["value"])) for row in csv.DictReader(file)]


def read_summary(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "summary.json").read_text())


class LossThat:
    """The lower loss, which does something else at one of its evaluations in a step of its own."""

    def __init__(self, at_step: int, act: Callable[[Tensor], Tensor]) -> None:
        self.step = 0
        self.at_step = at_step
        self.act = act

    def __call__(self, batch: Mapping[str, Tensor], *, model: Any, weigher: Any) -> LossOutput:
        output = lower_loss(batch, model=model, weigher=weigher)
        if next(iter(model.parameters())).requires_grad and torch.is_grad_enabled():
            return LossOutput(self._maybe_act(output.loss, model), output.metrics)
        return output

    def _maybe_act(self, loss: Tensor, model: Any) -> Tensor:
        # Its own step is the one that gives the model itself, not stand-ins for its parameters.
        if isinstance(next(iter(model.parameters())), torch.nn.Parameter):
            self.step += 1
            if self.step == self.at_step:
                return self.act(loss)
        return loss


def press_ctrl_c(loss: Tensor, number: int = signal.SIGINT) -> Tensor:
    os.kill(os.getpid(), number)
    return loss


def weight_analysis(batches: Any, *, model: Any, weigher: Any) -> dict[str, Tensor]:
    targets = torch.cat([batch["target"] for batch in batches])
    return {"weight": weigher(targets), "mean_weight": weigher(targets).mean()}


def test_a_run_leaves_all_its_files_and_logs_on_time(tiny_run: Run) -> None:
    analysis = Analysis(weight_analysis, {"model": "classifier", "weigher": "weights"})
    result = tiny_run(analyses={"by_class": analysis})
    names = ["config.yaml", "overrides.txt", "provenance.json", "graph.mmd", "metrics.csv", "summary.json"]
    for name in (*names, "artifacts/by_class.npz", "checkpoints/best.ckpt", "checkpoints/last.ckpt"):
        assert (result.output_dir / name).is_file(), name
    assert numpy.load(result.output_dir / "artifacts/by_class.npz")["weight"].shape == (40,)
    assert result.metrics["by_class/mean_weight"] > 0
    assert result.checkpoint == result.output_dir / "checkpoints/best.ckpt"
    ticks: dict[str, list[int]] = {}
    for tick, key, _ in read_metrics(result.output_dir):
        ticks.setdefault(key, []).append(tick)
    of_problems = [f"{problem}/{name}" for problem in ("classifier", "weights") for name in ("loss", "lr", "step")]
    for key in (*of_problems, "classifier/accuracy", "weights/hypergradient_norm", "weights/learned_logits_0"):
        assert ticks[key] == [5, 10, 15, 20], key
    assert ticks["val/accuracy"] == ticks["val/cross_entropy"] == [10, 20]
    # Splits of the end are evaluated at the best checkpoint.
    summary = read_summary(result.output_dir)
    assert ticks["test/accuracy"] == [summary["best"]["tick"]]
    assert summary["objective"] == {"key": "val/accuracy", "value": result.objective, "mode": "max"}
    assert (summary["status"], summary["error"], summary["num_ticks"]) == ("finished", None, 20)


def test_the_same_seed_gives_the_same_bits_whatever_the_chunks(tiny_run: Run) -> None:
    first, second = tiny_run(folder="first"), tiny_run({"runner.ticks_per_chunk": 3}, folder="second")
    assert read_metrics(first.output_dir) == read_metrics(second.output_dir)
    assert read_summary(tiny_run({"debug.limit_ticks": 3}, folder="third").output_dir)["num_ticks"] == 3


@pytest.mark.parametrize(("at", "good", "named"), [(13, 10, "after tick 10"), (2, 0, "the initial one.")])
def test_a_non_finite_loss_names_problem_and_tick_and_keeps_the_last_good_checkpoint(
    tiny_run: Run, tmp_path: Path, at: int, good: int, named: str
) -> None:
    with pytest.raises(NonFiniteLossError, match=rf"'classifier' became inf at tick {at};") as caught:
        tiny_run(loss=LossThat(at, lambda loss: loss * math.inf))
    assert (caught.value.problem, caught.value.tick, caught.value.run_dir) == ("classifier", at, tmp_path / "run")
    for part in (named, "Lower the one that is too large of problems.", "problems.weights.optimizer.lr (0.01 now)"):
        assert part in str(caught.value)
    for name in ("last", "best") if good else ("last",):
        assert_is_good(tmp_path / f"run/checkpoints/{name}.ckpt", good)
    summary = read_summary(tmp_path / "run")
    assert (summary["status"], summary["error"]) == ("failed", str(caught.value))


def assert_is_good(checkpoint: Path, tick: int) -> None:
    state = read_checkpoint(checkpoint)
    assert state["tick"] == tick
    for problem in state["program"].values():
        assert all(tensor.isfinite().all() for tensor in problem["module"].values())


def make_gradient_nan(loss: Tensor) -> Tensor:
    # sqrt has the derivative infinity at zero.
    return loss + (loss.detach() - loss).abs().sqrt() * 0


def test_parameters_that_became_nan_are_not_saved(tiny_run: Run, tmp_path: Path) -> None:
    # The last tick before the evaluation, at which the upper problem does not step: no loss shows it.
    with pytest.raises(NonFiniteParametersError, match=r"after tick 20, .*state that was saved, after tick \d+\.$"):
        tiny_run(loss=LossThat(20, make_gradient_nan), unroll_steps=3)
    for which in ("best", "last"):
        assert_is_good(tmp_path / f"run/checkpoints/{which}.ckpt", 10)
    assert 20 not in {tick for tick, key, _ in read_metrics(tmp_path / "run") if key == "val/accuracy"}
    assert read_summary(tmp_path / "run")["status"] == "failed"


@pytest.mark.parametrize("changes", [{}, {"evaluate": None, "objective": None}])
def test_parameters_are_looked_at_after_the_last_tick(tiny_run: Run, tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(NonFiniteParametersError) as caught:
        tiny_run({"runner.max_ticks": 1, **changes}, loss=LossThat(1, make_gradient_nan), unroll_steps=3)
    assert (caught.value.problem, caught.value.tick) == ("classifier", 1)
    assert_is_good(tmp_path / "run/checkpoints/last.ckpt", 0)


def test_what_is_interrupted_within_a_tick_is_no_state_to_go_on_from(tiny_run: Run, tmp_path: Path) -> None:
    """Unlike Ctrl-C, which ends a run after a tick: tests/runner/test_resume.py."""

    def interrupt(loss: Tensor) -> Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tiny_run(loss=LossThat(7, interrupt))
    summary = read_summary(tmp_path / "run")
    assert (summary["status"], summary["num_ticks"]) == ("interrupted", 6)
    assert read_checkpoint(tmp_path / "run/checkpoints/last.ckpt")["tick"] == 0


def test_an_error_of_the_users_code_is_passed_on(tiny_run: Run, tmp_path: Path) -> None:
    def fail(loss: Tensor) -> Tensor:
        raise KeyError("no such column")

    with pytest.raises(UserCodeError, match=r"After tick 1: .*KeyError: 'no such column'") as caught:
        tiny_run(loss=LossThat(2, fail))
    assert isinstance(caught.value.__cause__, KeyError)
    assert read_summary(tmp_path / "run")["error"] == str(caught.value)


def test_a_watcher_sees_each_evaluation_and_may_end_the_run(tiny_run: Run) -> None:
    seen: list[tuple[int, float]] = []

    def watch(tick: int, value: float) -> bool:
        seen.append((tick, value))
        return tick == 20

    result = tiny_run({"runner.max_ticks": 50, "runner.ticks_per_chunk": 4}, watch=watch)
    summary = read_summary(result.output_dir)
    assert (summary["status"], summary["num_ticks"], summary["error"]) == ("pruned", 20, None)
    key = summary["objective"]["key"]
    logged = [(tick, value) for tick, name, value in read_metrics(result.output_dir) if name == key]
    assert seen == [(tick, pytest.approx(value)) for tick, value in logged]
    assert [tick for tick, _ in seen] == [10, 20]
    assert read_checkpoint(result.output_dir / "checkpoints" / "last.ckpt")["tick"] == 20


@pytest.mark.parametrize(("key", "kept"), [(None, "last"), ("weights/loss", "best")])
def test_a_run_without_evaluation(tiny_run: Run, key: str | None, kept: str) -> None:
    result = tiny_run({"evaluate": None, "objective": key})
    assert result.objective == (None if key is None else result.metrics[key])
    assert result.checkpoint == result.output_dir / f"checkpoints/{kept}.ckpt"
    assert (read_summary(result.output_dir)["best"] is None) == (key is None)


def test_bf16_opens_autocast_around_the_losses_only(tiny_run: Run) -> None:
    seen = []

    def loss(batch: Mapping[str, Tensor], *, model: Any, weigher: Any) -> LossOutput:
        seen.append(model(batch["input"]).dtype)
        return lower_loss(batch, model=model, weigher=weigher)

    result = tiny_run({"debug.limit_ticks": 3}, loss=loss, precision="bf16")
    # The step itself, the finite difference of the pullback, and the look at what the weigher gives.
    assert (seen[0], *seen[-2:]) == (torch.bfloat16, torch.float32, torch.bfloat16)
    assert result.checkpoint is not None
    weights = read_checkpoint(result.checkpoint)["program"]["classifier"]["module"]
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}


@pytest.mark.slow
def test_a_run_with_remat_has_the_metrics_of_one_without_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    words = ["problems.classifier.module.num_layers=2", "debug=fast", "debug.limit_ticks=2", "logger=csv"]
    config = compose("mwn_text", [*words, "runner.progress_bar=false"])

    def metrics(remat: str | None) -> dict[tuple[int, str], float]:
        config.problems.classifier.remat = remat
        folder = run(config, output_dir=tmp_path / str(remat)).output_dir
        return {(tick, key): value for tick, key, value in read_metrics(folder)}

    caplog.set_level(logging.INFO, "mlotool")
    ours, its = metrics("auto"), metrics(None)
    said = [each for each in caplog.messages if "remat" in each]
    assert said == ["problems.classifier.remat: auto found 2 blocks, blocks.0 to blocks.1."]
    assert ours.keys() == its.keys()
    assert ours == pytest.approx(its, rel=1e-5, abs=1e-6)
    # The module alone is saved: it needs none of this to be loaded.
    states = [load(tmp_path / remat, "classifier").state_dict() for remat in ("auto", "None")]
    assert list(states[0]) == list(states[1])
