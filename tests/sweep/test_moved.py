"""The folder of a sweep that was renamed, or lies in another place now, is gone on with."""

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlotool.config.sweep_plan import Dimension
from mlotool.sweep.driver import run_jobs
from mlotool.sweep.folder import choose_folder
from mlotool.sweep.job_folder import JobSpec, read_job
from mlotool.sweep.study import StudyPoints
from tests.sweep.plans import HereAndNow, known, make_plan, sweep_in

optuna = pytest.importorskip("optuna")

RATE = Dimension("problems.classifier.optimizer.lr", low=1e-3, high=1.0)


class Killed(BaseException):
    pass


def copied(old: Path, new: Path) -> None:
    shutil.copytree(old, new)


def moved(old: Path, new: Path) -> None:
    new.parent.mkdir(exist_ok=True)
    old.rename(new)


def search(folder: Path, resume: str | None, dies_at: int | None, settings: dict[str, Any]) -> list[str]:
    trained = []

    def job(folder: Path, spec: JobSpec) -> tuple[str, float]:
        if int(folder.name) == dies_at:
            raise Killed
        trained.append(f"{folder.name}: {spec.words[-1]}")
        return "finished", float(folder.name)

    plan = make_plan(folder, RATE, num_trials=5, method="optuna", **settings)
    found, is_resumed = choose_folder(plan, resume)
    record = known(found, is_resumed=is_resumed)
    with contextlib.suppress(Killed):
        run_jobs(StudyPoints(plan, found, record), HereAndNow(job), [{}], sweep_in(found, record))
    return trained


@pytest.mark.parametrize(
    ("move", "to", "settings"),
    [
        (moved, "other", {}),
        (copied, "other", {"sampler_options": {"n_startup_trials": 1}}),
        (moved, "with a space", {"sampler": "nsga2"}),
        (moved, "other", {"storage": True}),
    ],
)
def test_a_search(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    move: Callable[[Path, Path], None],
    to: str,
    settings: dict[str, Any],
) -> None:
    monkeypatch.setattr("mlotool.sweep.driver.SECONDS_BETWEEN_LOOKS", 0.0)
    if settings.get("storage"):
        settings = {"storage": f"sqlite:///{tmp_path / 'all.db'}"}
    first, new = tmp_path / "first", tmp_path / to
    begun = search(first, None, 3, settings)
    move(first, new)
    rest = search(first, str(new), None, settings)
    assert [each.partition(":")[0] for each in [*begun, *rest]] == ["0", "1", "2", "3", "4"]
    watched = read_job(new / "4").study
    url = settings.get("storage") or f"sqlite:///{new / 'study.db'}"
    assert watched is not None
    assert watched["url"] == url
    [study] = optuna.get_all_study_summaries(url)
    assert (study.study_name, study.n_trials) == ("first", 5)
