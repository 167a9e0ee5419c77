"""A search that is killed at each write into its study: each model is trained once, and each trial ends."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from mlotool.core.errors import InfeasibleModelError
from mlotool.sweep.driver import run_jobs
from mlotool.sweep.job_folder import JobSpec
from mlotool.sweep.study import StudyPoints
from tests.sweep.plans import Ended, HereAndNow, known, make_plan, sweep_in

optuna = pytest.importorskip("optuna")

Decide = Callable[[str, tuple[Any, ...]], Any]
NUM_MODELS, MAX_KILLS = 2, 200
WRITES = (
    "create_new_trial",
    "set_trial_param",
    "set_trial_state_values",
    "set_trial_user_attr",
    "set_trial_system_attr",
    "set_study_user_attr",
    "set_study_system_attr",
)


class Killed(BaseException):
    pass


class Writes:
    """Counts the writes into a study, and dies at one of them: before it, or after it.

    Attributes:
        dies_at: the number of that write; None where there is none.
        is_after: whether it is done.
    """

    def __init__(self) -> None:
        self.start(None)

    def start(self, dies_at: "int | None", *, is_after: bool = False) -> None:
        self.num, self.dies_at, self.is_after = 0, dies_at, is_after

    def watched(self, write: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.num += 1
            is_last = self.num == self.dies_at
            if is_last and not self.is_after:
                raise Killed
            result = write(*args, **kwargs)
            if is_last:
                raise Killed
            return result

        return watched


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Writes]:
    """Watch the writes into a study."""
    from optuna.storages._cached_storage import _CachedStorage

    found = Writes()
    for name in WRITES:
        monkeypatch.setattr(_CachedStorage, name, found.watched(getattr(_CachedStorage, name)))
    monkeypatch.setattr("mlotool.sweep.study.MOST_IN_A_ROW", 6)
    monkeypatch.setattr("mlotool.sweep.driver.SECONDS_BETWEEN_LOOKS", 0.0)
    monkeypatch.setattr(Ended, "stop", lambda self: None)
    return found


def draw(words: Sequence[str], decide: Decide) -> dict[str, Any]:
    """Make one of two models: a, or b with one layer. With two layers b is none."""
    if decide("kind", ("a", "b")) == "b" and decide("depth", (1, 2)) == 2:
        raise InfeasibleModelError("two layers are too many")
    return {}


def search(folder: Path, trained: "Counter[tuple[str, ...]]", **settings: Any) -> StudyPoints:
    def job(folder: Path, spec: JobSpec) -> tuple[str, float]:
        trained[spec.words] += 1
        return "finished", float(len(trained))

    points = StudyPoints(make_plan(folder, num_trials=12, **settings), folder, known(folder), draw)
    run_jobs(points, HereAndNow(job), [{}], sweep_in(folder, known(folder)))
    return points


def search_killed_once(folder: Path, writes: Writes, dies_at: int, *, is_after: bool, **settings: Any) -> bool:
    """Search until a write, and go on; check what is left, and return whether there was such a write."""
    folder.mkdir()
    trained = Counter[tuple[str, ...]]()
    writes.start(dies_at, is_after=is_after)
    try:
        search(folder, trained, **settings)
        return False
    except Killed:
        writes.start(None)
    points = search(folder, trained, **settings)
    trials = optuna.load_study(study_name=None, storage=f"sqlite:///{folder / 'study.db'}").trials
    assert sorted(trained.values()) == [1] * NUM_MODELS
    assert all(each.state.is_finished() for each in trials)
    jobs = [each for each in folder.iterdir() if each.name.isdigit()]
    assert len(jobs) == points.num_ended == points.total == NUM_MODELS + 1
    return True


@pytest.mark.parametrize(
    ("is_after", "settings"),
    [
        (False, {"sampler": "brute_force"}),
        *(
            pytest.param(is_after, {"sampler": sampler, **more}, marks=pytest.mark.slow)
            for is_after in (False, True)
            for sampler, more in (("brute_force", {}), ("brute_force", {"fuse": 3}), ("evolution", {}))
        ),
    ],
    ids=str,
)
def test_each_model_is_trained_once(tmp_path: Path, writes: Writes, is_after: bool, settings: dict[str, Any]) -> None:
    for dies_at in range(1, MAX_KILLS):
        if not search_killed_once(tmp_path / str(dies_at), writes, dies_at, is_after=is_after, **settings):
            # It begins and ends three trials, of two decisions at most.
            assert dies_at > 12
            return
    raise AssertionError("the search has not ended")
