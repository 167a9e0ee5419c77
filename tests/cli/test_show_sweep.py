from pathlib import Path

import pytest

from tests.report.run_folders import write_job
from tests.report.test_search_page import printed

LONG = "problems.classifier_of_a_long_name.optimizer"


def table_of(text: str) -> list[str]:
    return text.strip().partition("\n\n")[0].splitlines()


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    for job in range(12):
        words = [f"{LONG}.parameter_{key}={0.123456789 * (job // 3 + 1)}" for key in range(4)]
        words += [f"hypergradient=conjugate_gradient_{job // 3}", f"seed={job % 3}"]
        write_job(tmp_path / str(job), *words, value=0.25 * (job // 3) + 0.01 * (job % 3))
    return tmp_path


@pytest.mark.parametrize("width", [50, 80, 200])
def test_the_tables_fit_the_terminal(sweep: Path, width: int) -> None:
    text = printed(sweep, width)
    lines = table_of(text)
    assert len(lines) == 13 + (text.count("No room for") > 0)
    assert all(len(line) <= width for line in lines[:13])
    assert all(line.split()[0] == str(job) for job, line in enumerate(lines[1:13]))
    assert sum("finished, best" in line for line in lines) == 3 and lines[0].split()[0] == "job"
    assert "val/loss" in lines[0]


def test_a_wide_terminal_has_all_columns(sweep: Path) -> None:
    head, first, *_ = table_of(printed(sweep, 300))
    assert head.split() == [
        "job",
        *(f"optimizer.parameter_{key}" for key in range(4)),
        *("hypergradient", "seed", "val/loss", "status", "time"),
    ]
    assert first.split() == ["0", *["0.1235"] * 4, "conjugate_gradient_0", "0", "0", "finished,", "best", "1.5", "s"]


def test_the_best_setting_is_named_with_its_seeds(sweep: Path) -> None:
    text = printed(sweep, 300)
    best = "best: jobs 0, 1, 2, val/loss 0.01 ± 0.0058 (mean ± standard error of 3 seeds; smaller is better)"
    assert best in text and "seed=" not in text.partition("best:")[2]
    [line] = [line for line in text.splitlines() if "★" in line]
    assert "0.0058  3 of 3  ★" in line and line.rstrip().endswith("0, 1, 2")
    assert (sweep / "settings.csv").is_file()


def test_of_a_large_sweep_the_best_jobs_are_in_the_table(tmp_path: Path) -> None:
    for job in range(205):
        write_job(tmp_path / str(job), f"lr={job}", value=abs(job - 195.0))
    text = printed(tmp_path, 80)
    assert [line.split()[0] for line in table_of(text)[1:]] == [*map(str, range(5, 205)), "5"]
    assert "5 more jobs are in sweep.csv; these are the best." in text
    assert "best: job 195, val/loss 0 (smaller is better): lr=195" in text
    assert len((tmp_path / "sweep.csv").read_text().splitlines()) == 206
