"""What the page of a run says of the best checkpoint, of rates that stay, and of what was learned."""

import re
from pathlib import Path

import numpy as np
import pytest

from mlotool.report import write_report
from mlotool.report.formats import NONE
from mlotool.report.run_figures import NUM_INTERVALS, Weighting, _medians, constant_rates
from mlotool.report.run_folder import Series
from tests.report.html_check import read_page
from tests.report.run_folders import mwn_rows, mwn_summary, weight_arrays, write_run


def series(key: str, *values: float) -> Series:
    owner, _, metric = key.partition("/")
    return Series(owner, metric, np.arange(len(values), dtype=float), np.array(values, dtype=float))


def test_what_is_evaluated_in_the_end_stands_under_the_best_checkpoint(tmp_path: Path) -> None:
    html = write_report(write_run(tmp_path / "run")).read_text()
    rows = re.findall(r'<tr><th scope="row">([^<]*)</th><td[^>]*>([^<]*)</td><td[^>]*>([^<]*)</td></tr>', html)
    assert ("accuracy", NONE, "0.9127") in rows
    assert ("wrong_label_auc", NONE, "0.9731") in rows


def test_a_test_at_the_best_checkpoint_says_so(tmp_path: Path) -> None:
    rows = [*((tick, key, value) for tick, key, value in mwn_rows() if key != "test/accuracy")]
    page = read_page(write_report(write_run(tmp_path / "run", rows=[*rows, (800, "test/accuracy", 0.9)])))
    assert "test: 0.9 at the best checkpoint (tick 800)." in page.text


def test_rates_that_stay_take_no_panel(tmp_path: Path) -> None:
    page = read_page(write_report(write_run(tmp_path / "run")))
    assert "Constant learning rate: reweight 0.001." in page.text
    colours = {"a": "problem-0", "b": "problem-1"}
    rates = [series("a/lr", 0.1, 0.1), series("b/lr", 0.01, 0.01), series("a/loss", 1.0, 1.0)]
    assert constant_rates(rates, colours) == "Constant learning rates: a 0.1, b 0.01."
    assert constant_rates([series("a/lr", 0.1, 0.2)], colours) == ""
    assert constant_rates([series("a/lr", np.nan, 0.2)], colours) == ""


def test_the_line_of_medians_breaks_where_there_are_no_samples() -> None:
    rng = np.random.default_rng(0)
    loss = np.concatenate([rng.uniform(0.0, 0.2, 300), rng.uniform(0.8, 1.0, 300), [0.5]])
    weighting = Weighting("weights", loss, (loss < 0.4).astype(float), None)
    x, y = _medians(weighting.loss, weighting.weight, is_log=False)
    drawn = x[~np.isnan(x)]
    assert ((drawn < 0.21) | (drawn > 0.79)).all()
    assert set(y[~np.isnan(y)]) == {0.0, 1.0}
    between = np.flatnonzero(np.isnan(x))
    assert (np.diff(between) == 1).all()
    assert 0 < between[0] < between[-1] < NUM_INTERVALS - 1


def test_what_upper_problems_learned_is_drawn_one_card_a_problem(tmp_path: Path) -> None:
    rows = [(tick, f"reweight/learned_value_{index}", index + tick / 10) for tick in (1, 2, 3) for index in range(3)]
    run = write_run(tmp_path / "run", rows=[*mwn_rows(100), *rows])
    page = read_page(write_report(run))
    for text in ("What the upper problems learned", "reweight: the 3 learned values", "value 2"):
        assert text in page.text
    assert (run / "report" / "learned-reweight.svg").is_file()
    many = [(tick, f"reweight/learned_value_{index}", index + tick / 10) for tick in (1, 2) for index in range(32)]
    page = read_page(write_report(write_run(tmp_path / "many", rows=[*mwn_rows(100), *many])))
    assert "reweight: the 32 learned values" in page.text
    assert "value 31" not in page.text


@pytest.mark.parametrize("steps", [0, 1])
def test_weights_of_a_warm_up_are_told_from_learned_ones(tmp_path: Path, steps: int) -> None:
    summary = mwn_summary()
    summary["best"]["metrics"] |= {"classifier/step": 800, "reweight/step": steps}
    run = write_run(tmp_path / "run", rows=[(1, "classifier/loss", 2.3)], summary=summary, arrays=weight_arrays(99))
    text = "No step had been made at the best checkpoint (tick 800) by reweight: what is drawn is how it began."
    assert (text in read_page(write_report(run)).text) is (steps == 0)
