"""What users of Lightning bring: callbacks, loggers, settings of the Trainer."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pytorch_lightning import Callback
from pytorch_lightning.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint

from mlotool.cli.main import main
from mlotool.core.errors import ConfigError
from mlotool.runner import RunResult

Run = Callable[..., RunResult]


class Seen(Callback):
    """Counts the ticks at which its hooks are called."""

    def __init__(self) -> None:
        self.ticks: dict[str, list[int]] = {}
        self.metrics: list[float] = []

    def _note(self, hook: str, module: Any) -> None:
        assert set(module.program.problems) == {"weights", "classifier"}
        self.ticks.setdefault(hook, []).append(module.schedule.num_ticks)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._note("batch", module)

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self._note("validation_start", module)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self._note("validation_end", module)
        self.metrics.append(float(trainer.callback_metrics["val/accuracy"]))

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
        self._note("save", module)

    def state_dict(self) -> dict[str, Any]:
        return {"metrics": list(self.metrics)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.metrics = state["metrics"]


def logged(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for row in csv.DictReader((folder / "metrics.csv").read_text().splitlines()):
        found.setdefault(row["key"], []).append((int(row["tick"]), float(row["value"])))
    return found


def test_a_callback_sees_chunks_evaluations_checkpoints_and_the_program(tiny_run: Run) -> None:
    seen = Seen()
    result = tiny_run(callbacks=[seen])
    assert seen.ticks["batch"] == [8, 10, 18, 20, 28, 30]
    assert seen.ticks["validation_start"] == seen.ticks["validation_end"] == [10, 20, 30]
    assert {0, 10, 30} <= set(seen.ticks["save"])
    assert seen.metrics == pytest.approx([value for _, value in logged(result.output_dir)["val/accuracy"]])


def test_a_callbacks_state_is_resumed(tiny_run: Run) -> None:
    tiny_run({"runner.max_ticks": 20}, callbacks=[Seen()])
    resumed = Seen()
    result = tiny_run(callbacks=[resumed], resume="auto")
    values = [value for _, value in logged(result.output_dir)["val/accuracy"]]
    assert len(values) == 3 and resumed.metrics == pytest.approx(values)


def test_lightnings_own_callbacks_work(tiny_run: Run, tmp_path: Path) -> None:
    monitor = LearningRateMonitor(logging_interval="step")
    kept = ModelCheckpoint(tmp_path / "kept", monitor="val/accuracy", mode="max", save_top_k=3)
    stopping = EarlyStopping("val/cross_entropy", patience=1, mode="max", check_on_train_epoch_end=False)
    result = tiny_run({"runner.max_ticks": 200}, callbacks=[monitor, kept, stopping])
    # Chunks begin where no tick of ours is logged.
    assert [tick for tick, _ in logged(result.output_dir)["lr-SGD"]][:3] == [0, 8, 10]
    assert list((tmp_path / "kept").glob("*.ckpt"))
    assert logged(result.output_dir)["val/accuracy"][-1][0] < 200


def test_the_trainer_takes_settings_that_no_other_key_decides(
    tiny_run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_run({"runner.trainer": {"profiler": "simple", "enable_model_summary": True}})
    out = capsys.readouterr()
    assert "problem_classifier" in out.out + out.err
    with pytest.raises(ConfigError, match=r"runner\.trainer\.max_steps: .* Write runner\.max_ticks"):
        tiny_run({"runner.trainer": {"max_steps": 3}}, folder="other")
    assert not (tmp_path / "other").exists()


WATCHING = """
import json
from pathlib import Path

from pytorch_lightning import Callback


class Watch(Callback):
    def __init__(self, path):
        self.path, self.seen = Path(path), []

    def on_validation_end(self, trainer, module):
        self.seen.append([module.schedule.num_ticks, float(trainer.callback_metrics["val/accuracy"])])
        self.path.write_text(json.dumps(self.seen))
"""
RECIPE = """# @package _global_
# A recipe with a user's callback, one of Lightning's, and a setting of its Trainer.
defaults: [plain, _self_]
name: watched
runner:
  max_ticks: 4
  ticks_per_chunk: 3
  report: false
  callbacks:
    - {_target_: watching.Watch, path: seen.json}
    - {_target_: pytorch_lightning.callbacks.LearningRateMonitor, logging_interval: step}
  trainer: {profiler: simple}
evaluate: {splits: {val: 2}}
"""
LOGGER = "logger.loggers=[{_target_: pytorch_lightning.loggers.CSVLogger, save_dir: own, name: logged, version: ''}]"
WORDS = ("logger=csv", "runner.progress_bar=false", "hydra.run.dir=run")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a package and a recipe that uses it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "watching.py").write_text(WATCHING)
    (tmp_path / "watched.yaml").write_text(RECIPE)
    return tmp_path


def test_a_recipe_brings_callbacks_and_settings_and_its_user_a_logger(
    here: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert main(["run", "watched.yaml", "--trust", "watching", *WORDS, LOGGER]) == 0
    seen = json.loads((here / "seen.json").read_text())
    assert [tick for tick, _ in seen] == [2, 4]
    assert "lr-SGD" in logged(here / "run") or "lr-Adam" in logged(here / "run")
    rows = list(csv.DictReader((here / "own/logged/metrics.csv").read_text().splitlines()))
    accuracies = [float(row["val/accuracy"]) for row in rows if row["val/accuracy"]]
    assert accuracies == pytest.approx([value for _, value in logged(here / "run")["val/accuracy"]])
    assert accuracies == pytest.approx([value for _, value in seen])
    assert "FIT Profiler Report" in caplog.text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("watched.yaml",), "runner.callbacks[0]._target_: found 'watching.Watch'"),
        (("plain", "runner.callbacks=[{_target_: os.system}]"), "runner.callbacks[0]._target_: found 'os.system'"),
        (("plain", "logger.loggers=[{_target_: torch.load}]"), "logger.loggers[0]._target_: found 'torch.load'"),
        (("plain", "+runner.trainer.max_epochs=3"), "runner.trainer.max_epochs: found an argument of the Trainer"),
    ],
)
def test_what_is_not_trusted_is_one_error_before_anything_is_written(
    here: Path, capfd: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    assert main(["run", *words, *WORDS]) == 2
    errors = [line for line in capfd.readouterr().err.splitlines() if "error:" in line]
    assert len(errors) == 1
    assert said in errors[0]
    assert not (here / "run/config.yaml").exists()
