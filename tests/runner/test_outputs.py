"""Histories of what upper problems give: compact, exact after a resume, and a collapse is told, but nothing else."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mlotool.folders.run_folder import RunFolder
from mlotool.runner import RunResult
from mlotool.runner.outputs import LOOKS_AT_THE_END, MAX_ROWS, MAX_SAMPLES, History
from tests.runner.tiny import lower_loss

RNG = np.random.default_rng(0)
LOSSES = RNG.exponential(size=200)


def test_a_history_stays_small_and_goes_on_exactly() -> None:
    looks = [(50 * k, RNG.random(30), RNG.random(30)) for k in range(1, 3 * MAX_ROWS)]
    whole, parts = History(), History()
    for number, look in enumerate(looks):
        whole.add(*look, 1)
        if number == 237:
            state, parts = parts.state_dict(), History()
            parts.load_state_dict(state)
        parts.add(*look, 1)
    ours, theirs = parts.arrays(), whole.arrays()
    assert all(np.array_equal(ours[key], theirs[key]) for key in theirs)
    assert len(ours["tick"]) <= MAX_ROWS and len(ours["value"]) == MAX_SAMPLES
    assert np.ptp(np.diff(ours["tick"])) == 0
    tick, values, _ = looks[int(ours["tick"][-1]) // 50 - 1]
    assert tick == ours["tick"][-1] and ours["count"][-1].sum() == 30
    assert (ours["low"][-1], ours["high"][-1]) == (values.min(), values.max())
    np.testing.assert_array_equal(ours["count"][-1], np.histogram(values, ours["count"].shape[1])[0])
    last = np.concatenate([values for _, values, _ in looks])[-MAX_SAMPLES:]
    np.testing.assert_array_equal(ours["value"], last)


def centred(weight: Any) -> Any:
    """Return `b dC/dw` up to a factor, where C divides the weights by their sum."""
    return LOSSES - (weight * LOSSES).sum() / weight.sum()


SPREAD = RNG.random(200)
ONE_WRONG = np.where(np.arange(200) == 7, 0.0, 1.0)


@pytest.mark.parametrize(
    ("weight", "losses", "kind"),
    [
        (0.7 + 0.002 * SPREAD, LOSSES, "equal"),
        (0.001 * SPREAD, LOSSES, "low"),
        (np.where(np.arange(200) == 7, 1.0, 0.001 * SPREAD), centred, "few"),
        (SPREAD, LOSSES, ""),
        # What finds wrong labels leaves the two ends of a sigmoid: that is success.
        (np.where(SPREAD < 0.4, 1e-6, 1 - 1e-6), LOSSES, ""),
        (ONE_WRONG, LOSSES, ""),
        # Where weights are divided by their sum, it does not matter that they are small.
        (0.001 * SPREAD, centred, ""),
    ],
)
def test_a_collapse_is_seen_and_success_is_none(weight: Any, losses: Any, kind: str) -> None:
    history = History()
    # The first look is before any step, at weights of a fresh net.
    history.add(50, 0.5 + 0.001 * SPREAD, LOSSES, 0)
    assert history.kind == ""
    for tick in range(100, 400, 50):
        history.add(tick, weight, losses(weight) if callable(losses) else losses, tick)
    assert (history.kind, history.in_a_row) == (kind, 6 if kind else 0)


def test_a_run_warns_once_and_says_so(tiny_run: Callable[..., RunResult], tmp_path: Path) -> None:
    def constant(self: Any, target: Tensor) -> Tensor:
        return 1.0 + 1e-9 * torch.sigmoid(self.logits)[target]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.runner.tiny.ClassWeights.forward", constant)
        with pytest.warns(UserWarning, match=r"problems\.weights: found all values .* baseline=fixed") as caught:
            result = tiny_run()
    assert sum("within 1%" in str(warning.message) for warning in caught) == 1
    summary = RunFolder(tmp_path / "run").summary()
    assert len(summary["findings"]) == 1 and str(LOOKS_AT_THE_END + 1) in summary["findings"][0]
    assert result.metrics["weights/output_mean"] == pytest.approx(1.0)


def test_what_cannot_be_looked_at_stops_no_run(tiny_run: Callable[..., RunResult]) -> None:
    def stubborn(batch: Any, *, model: Any, weigher: Any) -> Any:
        if not hasattr(weigher, "_call") or type(weigher._call).__name__ == "_Watched":
            raise RuntimeError("not like that")
        return lower_loss(batch, model=model, weigher=weigher)

    with pytest.warns(UserWarning, match=r"problems\.classifier\.loss: .*RuntimeError: not like that") as caught:
        result = tiny_run(loss=stubborn)
    assert len(caught) == 1 and "weights/output_mean" not in result.metrics
