"""What users of Lightning bring, and where numbers go: callbacks, loggers, settings of the Trainer, the screen."""

import csv
import json
import os
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from pytorch_lightning import Callback
from pytorch_lightning.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from pytorch_lightning.loggers import Logger
from rich.console import Console

from mlotool.cli.main import main
from mlotool.core.errors import ConfigError, NonFiniteLossError, WriteError
from mlotool.folders.safe_files import check_tree
from mlotool.runner import RunResult, logging
from tests.runner.test_run_config import LossThat, logged, read_metrics

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
    with pytest.raises(NonFiniteLossError):
        tiny_run({**SHORT, "logger.wandb": True}, folder="failed", loss=LossThat(2, lambda loss: loss * float("nan")))
    assert run.exit_code == 1


@pytest.mark.parametrize(("mode", "resume"), [("offline", None), ("online", "allow")])
def test_a_resumed_run_is_the_same_run_of_wandb(
    tiny_run: Run, fake_wandb: tuple[FakeRun, dict[str, Any]], tmp_path: Path, mode: str, resume: str | None
) -> None:
    changes = {"debug.limit_ticks": 5, "logger.wandb": None, "logger.mode": mode}
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
    assert all("The run continues without this logger: its values are in metrics.csv." in text for text in texts)
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
    assert [event.step for event in events.Scalars("classifier/loss")] == [5, 10, 15, 20]


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


ENDS = ("start", "epoch_end", "end")


class Seen(Callback):
    """Counts the ticks at which its hooks are called."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []
        self.metrics: list[float] = []

    def _note(self, hook: str, module: Any) -> None:
        assert set(module.program.problems) == {"weights", "classifier"}
        self.seen.append((hook, module.schedule.num_ticks))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs["classifier/loss"] == module.metric_log.last["classifier/loss"]
        self._note("batch", module)

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self._note("validation_start", module)

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        self._note("validation_epoch_end", module)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self._note("validation_end", module)
        self.metrics.append(float(trainer.callback_metrics["val/accuracy"]))

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
        self._note("save", module)

    def state_dict(self) -> dict[str, Any]:
        return {"metrics": list(self.metrics)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.metrics = state["metrics"]


def test_a_callback_sees_chunks_evaluations_checkpoints_and_the_program_and_is_resumed(tiny_run: Run) -> None:
    first, resumed = Seen(), Seen()
    tiny_run(callbacks=[first, ModelCheckpoint(monitor="val/accuracy", save_top_k=-1)])
    kept = ModelCheckpoint(monitor="val/accuracy", save_top_k=-1)
    result = tiny_run({"runner.max_ticks": 30}, callbacks=[resumed, kept], resume="auto")
    assert {Path(path).parent for path in kept.best_k_models} == {result.output_dir / "checkpoints/callbacks"}
    assert len(kept.best_k_models) == 3
    chunks = [("batch", 8), *((hook, 10) for hook in ("batch", *(f"validation_{x}" for x in ENDS)))]
    for seen, begins in ((first.seen, (0, 10)), (resumed.seen, (20,))):
        expected = [(hook, begin + tick) for begin in begins for hook, tick in chunks]
        assert [one for one in seen if one[0] != "save"] == expected
    assert {("save", 0), ("save", 10), ("save", 20)} <= set(first.seen)
    values = [*logged(result.output_dir, "val/accuracy").values()]
    assert len(values) == 3 and resumed.metrics == pytest.approx(values)


def test_lightnings_own_callbacks_work(tiny_run: Run, tmp_path: Path) -> None:
    monitor = LearningRateMonitor(logging_interval="step")
    kept = ModelCheckpoint(tmp_path / "kept", monitor="val/accuracy", mode="max", save_top_k=3)
    stopping = EarlyStopping("val/cross_entropy", patience=1, mode="max", check_on_train_epoch_end=False)
    result = tiny_run({"runner.max_ticks": 200}, callbacks=[monitor, kept, stopping])
    # Chunks begin where no tick of ours is logged.
    assert [*logged(result.output_dir, "lr-SGD")][:3] == [0, 8, 10]
    assert list((tmp_path / "kept").glob("*.ckpt"))
    assert max(logged(result.output_dir, "val/accuracy")) < 200


class Counting(Callback):
    """Records what Lightning counts: at the end of each chunk and of each round."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, int]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert batch[1] == trainer.global_step == module.global_step
        self.seen.append(("batch", trainer.global_step, trainer.current_epoch))

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.seen.append(("epoch", trainer.global_step, trainer.current_epoch))


class Recording(Logger):
    """A logger in the form of MLflow's: it sends each value with its step, and is told how the run ended."""

    name, version = "recording", "0"

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[int | None, dict[str, float]]] = []
        self.hyperparameters: dict[str, Any] = {}
        self.status = ""

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.sent.append((step, dict(metrics)))

    def log_hyperparams(self, params: Any, *_: Any, **__: Any) -> None:
        self.hyperparameters = dict(params)

    def finalize(self, status: str) -> None:
        self.status = status


def test_callbacks_and_loggers_get_the_ticks_also_after_a_resume(tiny_run: Run) -> None:
    counting, recording = Counting(), Recording()
    folder = tiny_run(callbacks=[counting], loggers=[recording]).output_dir
    again, more = Counting(), Recording()
    tiny_run({"runner.max_ticks": 30}, callbacks=[again], loggers=[more], resume=str(folder))
    rounds = [[("batch", 10 * k + 8, k), ("batch", 10 * k + 10, k), ("epoch", 10 * k + 10, k)] for k in range(3)]
    assert counting.seen == [*rounds[0], *rounds[1]]
    assert again.seen == rounds[2]
    # Each value of metrics.csv, at its tick, once.
    sent = [(tick, key, value) for tick, values in (*recording.sent, *more.sent) for key, value in values.items()]
    # The test split was evaluated at the end of both, and its first values are gone from the file.
    written = [(tick, key, pytest.approx(value)) for tick, key, value in read_metrics(folder)]
    assert [entry for entry in sent if "test" not in entry[1]] == [entry for entry in written if "test" not in entry[1]]
    assert {tick for tick, values in more.sent if "classifier/loss" in values} == {25, 30}
    assert recording.hyperparameters["runner"]["max_ticks"] == 20
    assert (recording.status, more.status) == ("success", "success")


class Ending(Callback):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop = True


def test_a_callback_may_end_a_run_before_its_first_evaluation(tiny_run: Run) -> None:
    result = tiny_run(callbacks=[Ending()])
    assert (result.objective, result.checkpoint) == (None, result.output_dir / "checkpoints/last.ckpt")


CSV = "{_target_: pytorch_lightning.loggers.CSVLogger, save_dir: own, name: logged}"
MONITOR = "{_target_: pytorch_lightning.callbacks.LearningRateMonitor, logging_interval: step}"
WORDS = ("plain", "runner.progress_bar=false", "runner.report=false", "hydra.run.dir=run")


def test_a_config_brings_callbacks_loggers_and_settings_of_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)  # an import of it would raise: nothing asks for W&B
    Path("mine.yaml").write_text(f"# @package _global_\ndefaults: [plain, _self_]\nlogger: {{loggers: [{CSV}]}}\n")
    words = ["mine.yaml", *WORDS[1:], "runner.max_ticks=4", "evaluate.splits.val=2", f"runner.callbacks=[{MONITOR}]"]
    assert main(["run", *words, "runner.trainer={profiler: simple, enable_model_summary: true}"]) == 0
    assert logged(tmp_path / "run", "lr-SGD")
    rows = list(csv.DictReader((tmp_path / "own/logged/version_0/metrics.csv").read_text().splitlines()))
    accuracies = [float(row["val/accuracy"]) for row in rows if row["val/accuracy"]]
    assert accuracies == pytest.approx([*logged(tmp_path / "run", "val/accuracy").values()])
    assert "FIT Profiler Report" in caplog.text
    assert "problem_classifier" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("runner.callbacks=[{_target_: watching.Watch}]", "runner.callbacks[0]._target_: found 'watching.Watch'"),
        ("logger.loggers=[{_target_: torch.load}]", "logger.loggers[0]._target_: found 'torch.load'"),
        ("+runner.trainer.max_steps=3", "runner.trainer.max_steps"),
        ("runner.trainer={profiler: {_target_: os.system}}", "runner.trainer={profiler"),
    ],
)
def test_what_is_not_trusted_is_one_error_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], word: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", *WORDS, word]) == 2
    errors = [line for line in capfd.readouterr().err.splitlines() if "error:" in line]
    assert len(errors) == 1
    assert said in errors[0]
    assert not (tmp_path / "run/config.yaml").exists()
