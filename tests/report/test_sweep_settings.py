from pathlib import Path

import pytest

from mlotool.report.sweep import compare, seeds
from mlotool.report.sweep_page import mean_text, write_sweep_page
from tests.report.sweep_folders import write_begun, write_job, write_plan


def grid(folder: Path, values: dict[str, list[float | None]], key: str = "seed", mode: str = "min") -> None:
    job = 0
    for rate, row in values.items():
        for seed, value in enumerate(row):
            status = "failed" if value is None else "finished"
            write_job(
                folder / str(job),
                f"a.lr={rate}",
                f"{key}={seed}",
                status=status,
                value=value,
                mode=mode,
                key="val/score",
            )
            job += 1


@pytest.mark.parametrize("key", ["seed", "data.seed"])
@pytest.mark.parametrize(("mode", "best"), [("min", "0.1"), ("max", "1")])
def test_jobs_that_differ_in_the_seed_are_one_setting(tmp_path: Path, key: str, mode: str, best: str) -> None:
    # The best job, 0.1 and 3.0, is not of the best setting.
    grid(tmp_path, {"0.1": [1.0, 1.2, 1.4], "1": [0.9, 2.0, 3.0]}, key, mode)
    found = compare(tmp_path)
    assert found.seed_keys == (key,)
    assert [column.key for column in found.columns] == ["a.lr"]
    assert found.best is not None
    assert found.best.parameters == {"a.lr": best}
    first = found.settings[0]
    assert first.mean == pytest.approx(1.2)
    assert first.standard_error == pytest.approx(0.2 / 3**0.5)
    assert (seeds(first), first.jobs) == ("3 seeds", "0, 1, 2")
    assert mean_text(first) == "1.2 ± 0.12"


def test_several_kinds_of_seed_are_samples_too(tmp_path: Path) -> None:
    for job in range(8):
        words = (f"seed={job % 2}", f"data.seed={job // 2 % 2}", f"lr={job // 4}")
        write_job(tmp_path / str(job), *words, value=float(job))
    assert [len(each.values) for each in compare(tmp_path).settings] == [4, 4]


def test_a_job_that_repeats_a_setting_and_a_seed_is_no_further_sample(tmp_path: Path) -> None:
    for job, (rate, seed, value) in enumerate(
        [("0.1", 0, 1.0), ("0.1", 1, 2.0), ("0.1", 1, 2.0), ("1", 0, 3.0), ("1", 0, 3.0), ("0.1", 1, None)]
    ):
        status = "failed" if value is None else "finished"
        write_job(tmp_path / str(job), f"a.lr={rate}", f"seed={seed}", status=status, value=value)
    found = compare(tmp_path)
    first, second = found.settings
    assert (first.values, first.mean, first.standard_error) == ((1.0, 2.0), 1.5, pytest.approx(0.5))
    assert (seeds(first), first.jobs) == ("2 seeds", "0, 2")
    assert (second.values, second.standard_error, seeds(second)) == ((3.0,), None, "1 seed")
    assert len(found.rows) == 6
    assert found.notes == ["Not counted, as another job has the same setting and the same seed: 1, 3, 5."]
    assert found.notes[0] in write_sweep_page(tmp_path, found).read_text()


def test_a_setting_that_was_drawn_twice_has_no_seeds(tmp_path: Path) -> None:
    for job, rate in enumerate(["0.1", "1", "0.1"]):
        write_job(tmp_path / str(job), f"a.lr={rate}", value=float(job))
    found = compare(tmp_path)
    assert not found.has_seeds
    assert [each.jobs for each in found.settings] == ["2", "1"]
    assert found.notes == ["Not counted, as another job has the same setting and the same seed: 0."]


def test_a_sweep_over_the_seed_alone_has_no_best(tmp_path: Path) -> None:
    for seed in range(3):
        write_job(tmp_path / str(seed), f"seed={seed}", value=float(seed))
    found = compare(tmp_path)
    assert (found.best, found.columns) == (None, ())
    assert found.only is not None
    assert found.only.mean == 1


def test_a_setting_that_lost_seeds_is_not_the_best_one_and_is_told_of(tmp_path: Path) -> None:
    grid(tmp_path, {"0.1": [1.0, 1.2, 1.4], "1": [0.1, None, 0.1], "9": [None, None, None]})
    found = compare(tmp_path)
    assert found.best is found.settings[0]
    assert seeds(found.settings[1]) == "2 of 3 seeds"
    assert found.notes == [
        "A setting with 2 of 3 seeds has a better mean, 0.1, but not all of its jobs have finished: a.lr=1."
    ]
    assert [each.parameters["a.lr"] for each in found.ranked] == ["0.1", "1"]


def test_seeds_that_have_not_begun_are_counted(tmp_path: Path) -> None:
    write_plan(tmp_path, 6, seed=3, **{"a.lr": 2})
    write_job(tmp_path / "0", "a.lr=0.1", "seed=0", value=0.5)
    write_job(tmp_path / "1", "a.lr=1", "seed=0", value=0.7)
    found = compare(tmp_path)
    assert found.best is not None
    assert seeds(found.best) == "1 of 3 seeds"
    assert found.notes == ["No setting has all of its jobs yet; the best one has 1 of 3 seeds."]
    assert (found.num_ended, found.num_jobs) == (2, 6)


def test_equal_settings_are_told_of(tmp_path: Path) -> None:
    grid(tmp_path, {"0.1": [0.5], "1": [0.5], "2": [0.7]})
    assert compare(tmp_path).notes == ["1 other setting has exactly the same value."]


def test_values_of_another_objective_are_not_compared(tmp_path: Path) -> None:
    write_job(tmp_path / "0", "a=1", value=0.5)
    write_job(tmp_path / "1", "a=2", value=0.7)
    write_job(tmp_path / "2", "a=3", value=0.1, key="train/loss")
    found = compare(tmp_path)
    assert found.best is found.settings[0]
    assert found.notes == ["Jobs with another objective are not compared: train/loss."]


def test_values_that_are_none_are_not_compared(tmp_path: Path) -> None:
    for job, value in enumerate([float("nan"), float("-inf"), -1e300, 0.5]):
        write_job(tmp_path / str(job), f"a={job}", value=value)
    best = compare(tmp_path).best
    assert best is not None
    assert best.jobs == "3"


def test_a_job_that_has_only_begun_makes_no_constant_a_hyperparameter(tmp_path: Path) -> None:
    write_job(tmp_path / "0", "a.lr=0.1", value=0.5)
    write_begun(tmp_path / "1", "a.lr=0.2")
    (tmp_path / "2").mkdir()
    found = compare(tmp_path)
    assert [column.key for column in found.columns] == ["a.lr"]
    assert found.columns[0].numbers == (0.1, 0.2)
    assert found.constants == {"recipe": "mwn", "runner.max_ticks": "60"}


def test_the_direction_is_that_of_the_metric_before_what_a_job_says(tmp_path: Path) -> None:
    for job in range(2):
        write_job(tmp_path / str(job), f"a={job}", value=float(job), key="val/loss", mode="max")
    best = compare(tmp_path).best
    assert best is not None
    assert best.jobs == "0"


def test_before_a_job_has_ended_the_objective_is_that_of_the_plan(tmp_path: Path) -> None:
    write_plan(tmp_path, 3)
    write_begun(tmp_path / "0", "a=1")
    assert (compare(tmp_path).objective, compare(tmp_path).mode) == ("val/loss", "min")
    write_job(tmp_path / "1", "a=2", status=None)
    (tmp_path / "1" / "config.yaml").write_text("objective: val/loss\nobjective_mode: null\n")
    (tmp_path / "plan.json").unlink()
    assert (compare(tmp_path).objective, compare(tmp_path).mode) == ("val/loss", "min")
