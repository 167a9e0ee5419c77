"""The trainer's clock, and what a user sees."""

from io import StringIO

import pytest
from pytorch_lightning import LightningModule, Trainer
from rich.console import Console

from mlotool.runner import progress
from mlotool.runner.progress import ProgressDisplay, advance_clock


def test_the_clock_counts_ticks_in_the_trainers_global_step() -> None:
    # The contract with Lightning's private progress counter.
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    module = LightningModule()
    module.automatic_optimization = False
    trainer.strategy.connect(module)
    assert trainer.global_step == 0
    advance_clock(trainer, 50)
    advance_clock(trainer, 7)
    assert trainer.global_step == 57


def test_a_terminal_shows_each_problem() -> None:
    output = StringIO()
    display = ProgressDisplay(["lower", "upper"], 100, console=Console(file=output, force_terminal=True, width=100))
    display.start(0)
    values = {"lower/loss": 0.25, "lower/step": 50.0, "upper/loss": 1.5, "upper/step": 10.0, "val/accuracy": 0.5}
    display.update(50, values, is_last=True)
    display.note(50, {"val/accuracy": 0.5})
    display.stop()
    text = output.getvalue()
    for part in ("lower", "loss 0.25", "50 steps", "10 steps", "50/100", "ticks/s", "val/accuracy"):
        assert part in text
    assert "tick 50/100" not in text


def test_a_log_file_gets_a_line_an_evaluation() -> None:
    output = StringIO()
    display = ProgressDisplay(["lower"], 100, console=Console(file=output, width=100))
    display.start(0)
    display.update(50, {"lower/loss": 0.25}, is_last=True)
    display.note(50, {"val/accuracy": 0.5})
    display.stop()
    assert output.getvalue().startswith("tick 50/100  val/accuracy 0.5")


def test_the_rate_is_that_of_the_last_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    output, clock = StringIO(), [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    display = ProgressDisplay(["lower"], 10_000, console=Console(file=output, width=100))
    display.start(0)
    # A warm-up of 100 ticks a second, and then 10 a second.
    for clock[0], tick in [(10.0, 1000), *((10.0 + second, 1000 + 10 * second) for second in range(1, 31))]:
        display.update(tick, {})
        display.note(tick, {"val/accuracy": 0.5})
    lines = output.getvalue().splitlines()
    assert lines[0].endswith("100 ticks/s")
    assert lines[-1].endswith("  10 ticks/s")
    assert sum(line.endswith("  10 ticks/s") for line in lines) > 10
