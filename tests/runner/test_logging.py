"""W&B, offline, TensorBoard, and the screen."""

import json
import os
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from mlotool.core.errors import ConfigError, WriteError
from mlotool.core.run_files import check_tree
from mlotool.runner import RunResult, logging

Run = Callable[..., RunResult]
SHORT = {"debug.limit_ticks": 5, "runner.checkpoint": False}


class FakeRun:
    """Stands in for a W&B run where the service is not needed."""

    def __init__(self) -> None:
        self.defined: dict[str, Any] = {}
        self.logged: list[dict[str, float]] = []
        self.exit_code: int | None = None

    def define_metric(self, name: str, **settings: Any) -> None:
        self.defined[name] = settings.get("step_metric")

    def log(self, values: dict[str, float]) -> None:
        self.logged.append(values)

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


@pytest.fixture
def fake_wandb(monkeypatch: pytest.MonkeyPatch) -> tuple[FakeRun, dict[str, Any]]:
    run, settings = FakeRun(), {}

    def init(**given: Any) -> FakeRun:
        settings.update(given)
        return run

    monkeypatch.setattr("wandb.init", init)
    return run, settings


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_an_offline_run_of_wandb_is_made_and_finished(tiny_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    monkeypatch.delenv("WANDB_MODE", raising=False)
    result = tiny_run({**SHORT, "logger.wandb": True})
    assert list((result.output_dir / "wandb").glob("offline-run-*/*.wandb"))
    check_tree(result.output_dir)  # as `resume` does: W&B links a log of its own, which lies elsewhere
    assert wandb.run is None
    assert "WANDB_MODE" not in os.environ


def test_each_problem_has_its_own_axis_in_wandb(tiny_run: Run, fake_wandb: tuple[FakeRun, dict[str, Any]]) -> None:
    run, settings = fake_wandb
    result = tiny_run({**SHORT, "logger.wandb": True})
    assert run.defined["classifier/*"] == "classifier/step"
    assert run.defined["weights/*"] == "weights/step"
    assert run.exit_code == 0
    assert {key for row in run.logged for key in row} >= {"classifier/loss", "val/accuracy", "trainer/global_step"}
    assert type(settings["config"]["runner"]) is dict
    assert (settings["mode"], settings["dir"]) == ("offline", str(result.output_dir))


@pytest.mark.parametrize(("mode", "resume"), [("offline", None), ("online", "allow")])
def test_a_resumed_run_is_the_same_run_of_wandb(
    tiny_run: Run, fake_wandb: tuple[FakeRun, dict[str, Any]], tmp_path: Path, mode: str, resume: str | None
) -> None:
    changes = {"debug.limit_ticks": 5, "logger.wandb": True, "logger.mode": mode}
    first = tiny_run(changes).output_dir
    assert "id" not in fake_wandb[1]
    for part in ("20260102_000000-abcd", "20260103_000000-abcd"):
        (first / f"wandb/offline-run-{part}").mkdir(parents=True)
    tiny_run({**changes, "debug.limit_ticks": 8, "resume": str(first)})
    assert (fake_wandb[1]["id"], fake_wandb[1].get("resume")) == ("abcd", resume)


class FailingRun(FakeRun):
    """Fails when it is told values, and when it is finished."""

    def log(self, values: dict[str, float]) -> None:
        super().log(values)
        raise OSError(28, "No space left on device")

    def finish(self, exit_code: int) -> None:
        super().finish(exit_code)
        raise RuntimeError("the service is gone")


def test_a_logger_that_fails_costs_no_training(tiny_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run = FailingRun()
    monkeypatch.setattr("wandb.init", lambda **settings: run)
    with pytest.warns(UserWarning) as told:
        result = tiny_run({**SHORT, "logger.wandb": True})
    texts = [str(warning.message) for warning in told]
    assert [text.partition(" (")[0] for text in texts] == [
        "WandbLogger no longer takes values",
        "A logger could not finish its files",
    ]
    assert all("The run does without it: its values stand in metrics.csv." in text for text in texts)
    assert len(run.logged) == 1
    assert json.loads((result.output_dir / "summary.json").read_text())["status"] == "finished"


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (PermissionError(13, "Permission denied"), WriteError, r"run/wandb: cannot be written \(Permission denied\)"),
        (RuntimeError("no service"), ConfigError, r"W&B does not start \(no service\).*wandb login"),
    ],
)
def test_a_logger_that_does_not_start_is_one_error_before_the_first_tick(
    tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[Exception], text: str
) -> None:
    def init(**settings: Any) -> Any:
        raise error

    monkeypatch.setattr("wandb.init", init)
    with pytest.raises(kind, match=text):
        tiny_run({**SHORT, "logger.wandb": True})
    assert json.loads((tmp_path / "run/summary.json").read_text())["num_ticks"] == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_hides_what_a_resumed_run_logs_again(tiny_run: Run) -> None:
    pytest.importorskip("tensorboard")
    first = tiny_run({"logger.tensorboard": True}).output_dir
    (first / "summary.json").unlink()
    best = first / "checkpoints/best.ckpt"
    tiny_run({"logger.tensorboard": True, "resume": str(best)})
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(first / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("classifier/loss")] == [5, 10, 15, 20, 25, 30]


def shown(**console: Any) -> str:
    output = StringIO()
    display = logging.ProgressDisplay(["lower", "upper"], 100, console=Console(file=output, width=100, **console))
    display.start(0)
    values = {"lower/loss": 0.25, "lower/step": 50.0, "upper/loss": 1.5, "upper/step": 10.0, "val/accuracy": 0.5}
    display.update(50, values, is_last=True)
    display.note(50, {"val/accuracy": 0.5})
    display.stop()
    return output.getvalue()


def test_a_terminal_shows_each_problem_and_a_log_file_a_line_an_evaluation() -> None:
    text = shown(force_terminal=True)
    for part in ("lower", "loss 0.25", "50 steps", "10 steps", "50/100", "ticks/s", "val/accuracy"):
        assert part in text
    assert "tick 50/100" not in text
    assert shown().startswith("tick 50/100  val/accuracy 0.5")
