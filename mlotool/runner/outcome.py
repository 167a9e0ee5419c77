"""How a run ended: what summary.json says."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlotool.core.errors import MlotoolError, WriteError
from mlotool.runner.checkpoint import read_checkpoint
from mlotool.runner.objective import Objective


class Outcome:
    """Filled in while a run goes on.

    Args:
        objective: the run's objective.
        num_parameters: of each problem's module.

    Attributes:
        status: "finished", "pruned", "failed" or "interrupted".
        error: the error's text.
        is_disk_at_fault: whether the error is that the disk did not take a file.
        metrics: the last value of every key.
        best: tick and metrics of the best checkpoint.
        num_ticks: ticks done.
        training_s: wall-clock seconds of training, with its evaluations and checkpoints.
    """

    def __init__(self, objective: Objective, num_parameters: Mapping[str, int]) -> None:
        self._objective, self._num_parameters = objective, dict(num_parameters)
        self.status = "failed"
        self.error: str | None = None
        self.is_disk_at_fault = False
        self.metrics: dict[str, float] = {}
        self.best: dict[str, Any] | None = None
        self.num_ticks = 0
        self.training_s = 0.0

    def fail(self, exception: BaseException) -> None:
        """Note an error."""
        self.status, self.is_disk_at_fault = "failed", isinstance(exception, WriteError)
        text = str(exception)
        self.error = text if isinstance(exception, MlotoolError) else f"{type(exception).__name__}: {text}"

    def note_best(self, state: Mapping[str, Any]) -> int:
        """Note what the best checkpoint says, once it has been read; return its tick."""
        self.best = {"tick": state["tick"], "metrics": state["metrics"]}
        return state["tick"]

    def complete(self, metrics: Mapping[str, float], num_ticks: int, best_checkpoint: Path) -> None:
        """Note what the run has reached."""
        self.metrics = dict(metrics)
        self.num_ticks = num_ticks
        if self.best is None and best_checkpoint.is_file():
            self.note_best(read_checkpoint(best_checkpoint))

    @property
    def objective(self) -> float | None:
        """The objective's value at the best checkpoint, else its last one."""
        if self._objective.key is None:
            return None
        best = {} if self.best is None else self.best["metrics"]
        return best.get(self._objective.key, self.metrics.get(self._objective.key))

    def summary(self) -> dict[str, Any]:
        """Return the contents of summary.json."""
        key, mode = self._objective.key, self._objective.mode
        return {
            "status": self.status,
            "objective": {"key": key, "value": self.objective, "mode": mode},
            "metrics": self.metrics,
            "best": self.best,
            "error": self.error,
            "num_ticks": self.num_ticks,
            "training_s": self.training_s,
            "num_parameters": self._num_parameters,
        }
