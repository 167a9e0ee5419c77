"""What upper problems gave: one figure over time, one against the losses, and no other figure of the same keys."""

from pathlib import Path

import numpy as np
import pytest

from mlotool.folders.run_folder import RunFolder
from mlotool.report import write_report
from mlotool.report.outputs import read_histories
from tests.report.run_folders import mwn_rows, mwn_summary, write_run

TICKS = np.arange(50, 1001, 50.0)


def history(num_bins: int = 32) -> dict[str, np.ndarray]:
    """Weights that come apart: at first all about 1/2, in the end half of them 0 and half 1."""
    rng = np.random.default_rng(0)
    wide = TICKS / 1000
    count = np.zeros((len(TICKS), num_bins))
    count[:, 0] = count[:, -1] = 50
    value = np.repeat([0.0, 1.0], 50)
    low, high = 0.5 - 0.5 * wide, 0.5 + 0.5 * wide
    return {"tick": TICKS, "low": low, "high": high, "count": count, "value": value, "loss": rng.random(100)}


def facts() -> list[tuple[int, str, float]]:
    values = {"mean": 0.5, "std": 0.1, "min": 0.0, "max": 1.0}
    return [(int(tick), f"reweight/output_{fact}", value) for tick in TICKS for fact, value in values.items()]


def figures(folder: Path) -> list[str]:
    write_report(folder)
    return sorted(path.stem for path in (folder / "report").glob("*.svg"))


@pytest.mark.parametrize("is_analysed", [False, True])
def test_an_output_is_drawn_over_time_and_once_against_the_loss(tmp_path: Path, is_analysed: bool) -> None:
    arrays = {"weight": np.linspace(0, 1, 60), "loss": np.linspace(1, 0, 60)} if is_analysed else None
    summary = {**mwn_summary(), "findings": ["problems.reweight: found all values"]}
    folder = write_run(tmp_path / "run", rows=[*mwn_rows(), *facts()], summary=summary, arrays=arrays)
    RunFolder(folder).write_arrays("outputs_reweight.output", history())
    drawn = figures(folder)
    assert "outputs-reweight-output" in drawn and ("outputs-reweight-against-loss" in drawn) is not is_analysed
    assert not any("output_mean" in name or name.startswith("training-output") for name in drawn)
    assert "problems.reweight: found all values" in (folder / "report.html").read_text()


def test_without_its_histograms_the_mean_is_drawn_and_a_broken_file_is_a_note(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rows=[*mwn_rows(), *facts()])
    assert "outputs-reweight-output" in figures(folder)
    RunFolder(folder).write_arrays("outputs_reweight.output", {**history(), "low": np.zeros(3)})
    histories, notes = read_histories(RunFolder(folder))
    assert not histories and "outputs_reweight.output.npz could not be drawn: expected arrays of one length" in notes[0]
    assert "outputs-reweight-output" in figures(folder)
