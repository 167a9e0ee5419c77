"""Jobs that differ in nothing but the seed are samples of one setting; which setting is the best."""

from pathlib import Path

import pytest

from mlotool.report.formats import NONE
from mlotool.report.sweep import Column, Comparison, compare, labels, mean_text, seeds
from mlotool.report.sweep_page import write_sweep_page
from tests.report.sweep_folders import write_begun, write_job, write_plan


def grid(folder: Path, values: dict[str, list[float | None]], key: str = "seed", mode: str = "min") -> Comparison:
    cells = [(rate, seed, value) for rate, row in values.items() for seed, value in enumerate(row)]
    for job, (rate, seed, value) in enumerate(cells):
        status, words = "failed" if value is None else "finished", (f"a.lr={rate}", f"{key}={seed}")
        write_job(folder / str(job), *words, status=status, value=value, mode=mode, key="val/score")
    return compare(folder)


def best_jobs(folder: Path) -> str | None:
    best = compare(folder).best
    return None if best is None else best.jobs


@pytest.mark.parametrize(("key", "mode", "best"), [("seed", "min", "0.1"), ("data.seed", "max", "1")])
def test_jobs_that_differ_in_the_seed_are_one_setting(tmp_path: Path, key: str, mode: str, best: str) -> None:
    # The best job, 0.1 and 3.0, is not of the best setting.
    comparison = grid(tmp_path, {"0.1": [1.0, 1.2, 1.4], "1": [0.9, 2.0, 3.0]}, key, mode)
    assert comparison.seed_keys == (key,) and [column.key for column in comparison.columns] == ["a.lr"]
    assert comparison.best is not None and comparison.best.parameters == {"a.lr": best}
    first = comparison.settings[0]
    assert (first.mean, first.standard_error) == (pytest.approx(1.2), pytest.approx(0.2 / 3**0.5))
    assert (seeds(first), first.jobs, mean_text(first)) == ("3 seeds", "0, 1, 2", "1.2 ± 0.12")


def test_several_kinds_of_seed_are_samples_too(tmp_path: Path) -> None:
    for job in range(8):
        words = (f"seed={job % 2}", f"data.seed={job // 2 % 2}", f"lr={job // 4}")
        write_job(tmp_path / str(job), *words, value=float(job))
    assert [len(setting.values) for setting in compare(tmp_path).settings] == [4, 4]


def test_a_job_that_repeats_a_setting_and_a_seed_is_no_further_sample(tmp_path: Path) -> None:
    for job, (rate, seed, value) in enumerate(
        [("0.1", 0, 1.0), ("0.1", 1, 2.0), ("0.1", 1, 2.0), ("1", 0, 3.0), ("1", 0, 3.0), ("0.1", 1, None)]
    ):
        status = "failed" if value is None else "finished"
        write_job(tmp_path / str(job), f"a.lr={rate}", f"seed={seed}", status=status, value=value)
    comparison = compare(tmp_path)
    first, second = comparison.settings
    assert (first.values, first.mean, first.standard_error) == ((1.0, 2.0), 1.5, pytest.approx(0.5))
    assert (seeds(first), first.jobs) == ("2 seeds", "0, 2")
    assert (second.values, second.standard_error, seeds(second)) == ((3.0,), None, "1 seed")
    [note] = comparison.notes
    assert note == "Not counted, as another job has the same setting and the same seed: 1, 3, 5."
    assert note in write_sweep_page(tmp_path, comparison).read_text()


def test_a_sweep_over_the_seed_alone_has_no_best(tmp_path: Path) -> None:
    for seed in range(3):
        write_job(tmp_path / str(seed), f"seed={seed}", value=float(seed))
    comparison = compare(tmp_path)
    assert (comparison.best, comparison.columns) == (None, ())
    assert comparison.only is not None and comparison.only.mean == 1


def test_a_setting_that_lost_seeds_is_not_the_best_one(tmp_path: Path) -> None:
    comparison = grid(tmp_path, {"0.1": [1.0, 1.2, 1.4], "1": [0.1, None, 0.1], "9": [None, None, None]})
    assert comparison.best is comparison.settings[0] and seeds(comparison.settings[1]) == "2 of 3 seeds"
    assert [setting.parameters["a.lr"] for setting in comparison.ranked] == ["0.1", "1"]
    [note] = comparison.notes
    assert note.startswith(
        "A setting with 2 of 3 seeds has a better mean, 0.1, but not all of its jobs have finished: a.lr=1"
    )


def test_seeds_that_have_not_begun_are_counted(tmp_path: Path) -> None:
    write_plan(tmp_path, 6, seed=3, **{"a.lr": 2})
    for job, rate in enumerate(("0.1", "1")):
        write_job(tmp_path / str(job), f"a.lr={rate}", "seed=0", value=0.5 + job)
    comparison = compare(tmp_path)
    assert comparison.best is not None and seeds(comparison.best) == "1 of 3 seeds"
    assert (comparison.num_ended, comparison.num_jobs) == (2, 6)
    assert comparison.notes == ["No setting has all of its jobs yet; the best one has 1 of 3 seeds."]


def test_settings_of_one_value_are_told(tmp_path: Path) -> None:
    comparison = grid(tmp_path, {"0.1": [1.0, 1.0], "1": [1.0, 1.0], "9": [2.0, 2.0]})
    assert comparison.notes == ["1 other setting has exactly the same value."]


def test_only_finite_values_of_the_same_objective_are_compared(tmp_path: Path) -> None:
    for job, value in enumerate([float("nan"), float("-inf"), -1e300, 0.5, 0.7]):
        write_job(tmp_path / str(job), f"a={job}", value=value)
    write_job(tmp_path / "5", "a=5", value=0.1, key="train/loss")
    assert best_jobs(tmp_path) == "3"
    assert compare(tmp_path).notes == ["Jobs with another objective are not compared: train/loss."]


def test_a_job_that_has_only_begun_makes_no_constant_a_hyperparameter(tmp_path: Path) -> None:
    write_job(tmp_path / "0", "a.lr=0.1", value=0.5)
    write_begun(tmp_path / "1", "a.lr=0.2")
    (tmp_path / "2").mkdir()
    comparison = compare(tmp_path)
    assert [(column.key, column.numbers) for column in comparison.columns] == [("a.lr", (0.1, 0.2))]
    assert comparison.constants == {"recipe": "mwn", "runner.max_ticks": "60"}


def test_the_direction_is_that_of_the_metric_then_of_the_plan(tmp_path: Path) -> None:
    for job in range(2):
        write_job(tmp_path / "a" / str(job), f"a={job}", value=float(job), key="val/loss", mode="max")
    assert best_jobs(tmp_path / "a") == "0"
    write_plan(tmp_path / "b", 3)
    write_begun(tmp_path / "b" / "0", "a=1")
    assert (compare(tmp_path / "b").objective, compare(tmp_path / "b").mode) == ("val/loss", "min")


def test_columns_have_short_labels_and_numbers_by_size_before_words() -> None:
    keys = ["problems.a.optimizer.lr", "problems.b.optimizer.lr", "seed", "decisions.kernel_0"]
    assert list(labels(keys).values()) == ["a.optimizer.lr", "b.optimizer.lr", "seed", "kernel_0"]
    assert labels(keys[1:])[keys[1]] == "optimizer.lr"
    column = Column("a", "a", ("10", "null", "9", "1e-3", None))
    assert column.numbers is None and column.names == ["1e-3", "9", "10", "null", NONE]
    assert Column("a", "a", ("10", "9")).numbers == (10, 9)
    for texts, is_drawn, is_log in ((("0.01", "1"), False, True), (("1", "2"), False, False), (("1", "2"), True, True)):
        assert Column("a", "a", texts, is_drawn_by_logarithm=is_drawn).is_log is is_log
    assert not Column("a", "a", ("0", "2"), is_drawn_by_logarithm=True).is_log
