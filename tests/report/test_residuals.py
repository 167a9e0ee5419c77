from pathlib import Path

import numpy as np

from mlotool.report import write_report
from mlotool.report.residuals import _history, split_residuals
from mlotool.report.series import Series
from tests.report.html_check import read_page
from tests.report.run_folders import write_run


def _series(cycle: int, *values: float, solve: str = "forward") -> Series:
    ticks = np.arange(1.0, len(values) + 1)
    return Series("classifier", f"{solve}_residual_{cycle}", ticks, np.array(values))


def test_residuals_are_told_from_other_metrics() -> None:
    other = Series("classifier", "residual", np.ones(1), np.ones(1))
    cycles = [_series(0, 1.0), _series(1, 0.1), _series(10, 0.01, solve="layers.backward")]
    assert split_residuals([cycles[0], other, *cycles[1:]]) == (cycles, [other])


def test_a_history_goes_over_the_cycles_of_one_tick() -> None:
    cycles = {0: _series(0, 1.0, 4.0), 1: _series(1, 0.1, 0.2), 2: _series(2, 0.0, 0.01), 3: _series(3, np.nan)}
    assert [each.tolist() for each in _history(cycles, 1.0)] == [[0, 1], [1.0, 0.1]]
    assert [each.tolist() for each in _history(cycles, 2.0)] == [[0, 1, 2], [4.0, 0.2, 0.01]]


def test_the_page_shows_a_figure_a_solve(tmp_path: Path) -> None:
    rows = [(tick, "classifier/loss", 1.0 / tick) for tick in (1, 2)]
    for tick in (1, 2):
        for cycle in range(4):
            rows.append((tick, f"classifier/forward_residual_{cycle}", 10.0**-cycle))
            rows.append((tick, f"classifier/backward_residual_{cycle}", 0.0))
    run = write_run(tmp_path / "run", rows=rows)
    page = read_page(write_report(run))
    names = {file.name for file in (run / "report").iterdir()}
    assert names >= {"residuals-classifier-forward.png", "residuals-classifier-backward.png", "loss-classifier.png"}
    assert not any("training" in name for name in names)
    assert "classifier: residuals, forward" in page.text
    assert all(text in page.text for text in ("tick 1", "tick 2", "cycle"))
