import re
import shutil
import subprocess
from pathlib import Path

import pytest

from mlotool.report.sweep import Column, compare
from mlotool.report.sweep_figures import importances, inherited_pairs
from tests.report.html_check import Page
from tests.report.html_check import read_sweep_page as read
from tests.report.run_folders import write_begun, write_job, write_plan

CHROMIUM = shutil.which("chromium")


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    folder = tmp_path / "mwn" / "multirun" / "2026-01-01_00-00-00"
    rates = (0.001, 0.01, 0.1, 0.5, 0.002, 0.05)
    for index, rate in enumerate(rates):
        words = (f"problems.a.optimizer.lr={rate}", f"hypergradient={'cg' if index % 2 else 'neumann'}")
        write_job(folder / str(index), *words, value=1 - rate, curve=(2.0, 1.5, 1 - rate))
    lost = ("problems.a.optimizer.lr=0.3", "hypergradient=cg")
    write_job(folder / "6", *lost, status="pruned", value=0.2, curve=(2.0, 0.2))
    write_job(folder / "7", "problems.a.optimizer.lr=9", "hypergradient=cg", status="failed", error="<b>nan</b>")
    return folder


def test_the_page_shows_every_job_with_a_link_to_its_page(sweep: Path) -> None:
    page = read(sweep)
    assert "mwn: sweep" in page.text
    assert "best of 6 jobs that finished, val/loss 0.5 smaller is better" in page.text
    assert "best job 3" in page.text and "1 of 8 failed" in page.text
    assert "jobs that have ended 8 of 8 6 finished, 1 pruned, 1 failed" in page.text
    assert "<b>nan</b>" in page.text and "problems.a.optimizer.lr=0.5 hypergradient=cg" in page.text
    assert "The value of a job is that of its best checkpoint" in page.text
    assert page.source.count('<figure class="row">') == 1, "the wide figure alone takes a row"
    drawn = {file.stem for file in (sweep / "report").iterdir()}
    assert drawn == {"curves", "importance", "objective", "parallel"}
    assert "The same in all jobs recipe=mwn runner.max_ticks=60" in page.text
    assert [link for link in page.links if link.startswith("./")] == [f"./{job}/report.html" for job in range(8)]
    states = re.findall(r'<span aria-hidden="true">.</span> (\w+)</span></td>', page.source)
    assert states == ["finished"] * 6 + ["pruned", "failed"]


def test_seeds_are_not_compared_with_each_other(tmp_path: Path) -> None:
    for job in range(18):
        words = (f"problems.a.optimizer.lr={10.0 ** -(job // 3)}", f"seed={job % 3}", f"x={job // 9}")
        write_job(tmp_path / str(job), *words, value=job // 3 + 0.1 * (job % 3))
    page = read(tmp_path)
    assert "best of 6 settings, val/loss 0.1 ± 0.058 mean ± standard error of 3 seeds; smaller is better" in page.text
    assert "jobs of the best setting 0, 1, 2" in page.text
    # A seed is no part of the best setting; the line that repeats it has all of them.
    assert page.text.count("seed=0") == page.text.count("seed=0,1,2") == 1
    assert "1 1 0 0.1 0.058 3 of 3 ★ 0, 1, 2" in page.text
    found = page.source.partition("Importance of the hyperparameters")[2].partition("</figure>")[0]
    assert {"optimizer.lr", "x"} <= set(re.findall(r">([\w.]+)</text>", found))
    assert "seed" not in re.findall(r">([\w.]+)</text>", found) and "over the 6 settings" in found


def test_the_seed_alone_has_a_mean_and_no_best(tmp_path: Path) -> None:
    for seed in range(5):
        write_job(tmp_path / str(seed), f"seed={seed}", value=0.5 + 0.1 * seed)
    page = read(tmp_path)
    assert "val/loss 0.7 ± 0.071 mean ± standard error of 5 seeds; smaller is better" in page.text
    assert not [text for text in ("best job", "best setting", "best of") if text in page.text]
    assert page.tags.count("figure") == 1


def test_an_unfinished_search_says_what_is_left(tmp_path: Path) -> None:
    key = "problems.classifier.optimizer.lr"
    write_plan(tmp_path, 20, log_keys=[key])
    for job, rate in enumerate((0.02, 0.015, 0.03)):
        write_job(tmp_path / str(job), f"{key}={rate}", f"b={'yx'[job % 2]}", value=rate)
    write_begun(tmp_path / "3", f"{key}=0.5", "b=x")
    columns = compare(tmp_path).columns
    assert [(column.label, column.is_log) for column in columns] == [("optimizer.lr", True), ("b", False)]
    page = read(tmp_path)
    drawn = (tmp_path / "report" / "parallel.svg").read_text()
    assert all(
        f">{text}</text>" in drawn for text in ("optimizer.lr", "b", "x", "y", "0.015", "0.02", "0.03", "val/loss")
    )
    assert "not finished: 3 of 20 jobs have ended" in page.text
    assert "3 finished, 1 unfinished, 16 not begun" in page.text
    assert "The same in all jobs so far recipe=mwn" in page.text


@pytest.mark.parametrize(("num_ended", "status"), [(0, "failed"), (1, None), (2, "pruned")])
def test_few_jobs_make_a_page_too(tmp_path: Path, num_ended: int, status: str | None) -> None:
    write_plan(tmp_path, 9)
    assert "no job has begun yet" in read(tmp_path).text
    write_job(tmp_path / "8", "a.lr=9", status=status, error="no" if status == "failed" else None, curve=(2.0, 1.0))
    for job in range(num_ended):
        write_job(tmp_path / str(job), f"a.lr={job}", value=0.5 + job, curve=(2.0, 1.0))
    page = read(tmp_path)
    assert f"{num_ended + (status is not None)} of 9 jobs have ended" in page.text
    assert (status or "unfinished") in page.text
    assert ("no job has finished with a value yet" in page.text) is (num_ended == 0)


def test_a_value_that_crushes_the_rest_is_clipped_and_told(tmp_path: Path) -> None:
    for job, value in enumerate((0.5, 0.7, 0.6, 0.9, 0.8, 1e6)):
        write_job(tmp_path / str(job), f"a.lr={job + 1}", f"b={job % 2}", value=value, curve=(1.0, value))
    page = read(tmp_path)
    assert page.text.count("Outliers are clipped: they are at the edge, or outside.") == 3
    assert "values that crush the others are clipped" in page.text
    assert ">1000000</td>" in page.source, "the table has it"


def test_a_sweep_with_extreme_numbers_and_more_keys_than_a_command_has_makes_a_page(tmp_path: Path) -> None:
    numbers = (1e-320, 1e149, -1e149, 0.5, 1e308, float("inf"), 0.0, 1.0)
    for job, value in enumerate(numbers):
        words = [f"key_{key}_of_{job % 3}={numbers[(job + key) % 8]!r}" for key in range(300)]
        write_job(tmp_path / str(job), *words, value=value, key="val/$x_1$", curve=(value, 1.0, 1e-320))
    page = read(tmp_path)
    assert "8 finished" in page.text
    assert page.source.count("<th ") <= 100, "two tables of some forty columns"


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
def test_a_click_sorts_by_size_and_the_policy_allows_the_script_alone(tmp_path: Path) -> None:
    for job, value in enumerate((10.0, 9.0, None, 100.0, -1.0)):
        write_job(tmp_path / str(job), f"a.lr={job}", value=value, status="failed" if value is None else "finished")
    page = read(tmp_path)
    file = tmp_path / "sweep.html"
    assert 'class="sortable scripted"' in dump_dom(tmp_path, file)
    other = tmp_path / "other.html"
    other.write_text(page.source.replace("</body>", "<script>document.title = 'broken'</script></body>"))
    assert "<title>broken" not in dump_dom(tmp_path, other)
    click = (
        "for (const each of document.querySelectorAll('th button')) if (each.textContent == 'val/loss') each.click();"
    )
    unsafe = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.source)
    for clicks, order in ((1, "41032"), (2, "30142")):
        other.write_text(unsafe.replace("</body>", f"<script>{click * clicks}</script></body>"))
        found = re.findall(r'<td data-sort="(\d)"><a', dump_dom(tmp_path, other))
        assert "".join(found) == order, "by size, and what is missing last"


def dump_dom(folder: Path, file: Path) -> str:
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    words += ["--disable-component-update", "--disable-sync", f"--user-data-dir={folder / 'browser'}", "--dump-dom"]
    done = subprocess.run(
        [CHROMIUM or "", *words, file.as_uri()], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout


def test_importances_are_shares_that_sum_to_one() -> None:
    rates = Column("lr", "lr", tuple(str(value) for value in range(12)))
    names = Column("solver", "solver", ("cg", None, "exact") * 4)
    shares = importances([names, rates], [float(value) for value in range(12)])
    assert [label for label, _ in shares] == ["lr", "solver"]
    assert sum(share for _, share in shares) == pytest.approx(1.0)
    assert importances([names, rates], [0.0] * 12) == [] == importances([rates], [1.0, 2.0])


def write_inherited(folder: Path, pairs: list[tuple[float | None, float]]) -> Page:
    """Write a sweep whose jobs began with inherited weights."""
    for number, (before, after) in enumerate(pairs):
        metrics = {} if before is None else {"inherited/val/loss": before}
        write_job(folder / str(number), f"decisions.kernel_0=k{number}", value=after, metrics=metrics)
    return read(folder)


def test_the_page_shows_inherited_beside_trained(tmp_path: Path) -> None:
    page = write_inherited(tmp_path / "a", [(0.3, 0.1), (0.5, 0.3), (0.4, 0.2), (0.6, 0.4), (None, 9.0)])
    assert inherited_pairs(compare(tmp_path / "a")) == [(0.3, 0.1), (0.5, 0.3), (0.4, 0.2), (0.6, 0.4)]
    assert "Rank correlation (Spearman) of 4 jobs: 1.00, interval of 95 % from 1.00 to 1.00." in page.text
    assert "Rank correlation" not in write_inherited(tmp_path / "b", [(0.3, 0.1), (0.5, 0.3)]).text
    page = write_inherited(tmp_path / "c", [(0.3, 0.1), (0.3, 0.3), (0.3, 0.2)])
    assert "The 3 jobs have no rank correlation: one of the two is the same for all." in page.text
