"""A search that is killed at any moment, and gone on with: it draws and trains what it would have, each model once."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from mlotool.config.sweeps.sweep_plan import Dimension
from mlotool.core.errors import InfeasibleModelError
from mlotool.sweep.folder import JobSpec, choose_folder, read_job
from mlotool.sweep.study import StudyPoints
from tests.sweep.plans import Decide, Killed, known, make_plan, rate, run, states, take_up, words_of

optuna = pytest.importorskip("optuna")

LR = "problems.classifier.optimizer.lr"
DIMENSIONS = (
    Dimension(LR, low=1e-3, high=1.0, log=True),
    Dimension("problems.classifier.stream.batch_size", low=1, high=99, whole=True),
    Dimension("data", ("digits", "mnist")),
)
NUM_TRIALS = 6
Words = list[tuple[str, ...]]


def search(folder: Path, kills: Iterator[int], **settings: Any) -> Words:
    """Search until the job of the next kill begins; return the words of all jobs."""
    trained: Words = []
    dies_at = next(kills, None)

    def job(folder: Path, spec: JobSpec) -> tuple[str, float]:
        assert not (folder / "config.yaml").exists()
        (folder / "config.yaml").write_text("half-way")
        if int(folder.name) == dies_at:
            raise Killed
        trained.append(spec.words)
        return "finished", -abs(float(words_of(spec)[LR]) - 0.1)

    try:
        run(take_up(folder, *DIMENSIONS, num_trials=NUM_TRIALS, **settings), folder, job)
    except Killed:
        return [*trained, *search(folder, kills, **settings)]
    return trained


SAMPLERS: dict[str, dict[str, Any]] = {
    "random": {"sampler": "random"},
    "tpe": {"sampler": "tpe", "sampler_options": {"n_startup_trials": 3}},
    "tpe, in groups": {"sampler_options": {"n_startup_trials": 2, "multivariate": True, "group": True}},
    "nsga2": {"sampler": "nsga2", "sampler_options": {"population_size": 3}},
    "evolution": {"sampler": "evolution", "sampler_options": {"population_size": 3, "sample_size": 2}},
}


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.usefixtures("in_memory")
def test_the_same_settings_as_a_search_that_was_not_killed(tmp_path: Path, name: str) -> None:
    whole = search(tmp_path / "whole", iter(()), **SAMPLERS[name])
    assert len(set(whole)) == NUM_TRIALS
    assert search(tmp_path / "killed", iter((0, 1, 4)), **SAMPLERS[name]) == whole
    other = search(tmp_path / "other", iter(()), **{**SAMPLERS[name], "seed": 3})
    assert not set(other) & set(whole)


@pytest.mark.parametrize(("sampler", "name"), [("random", DIMENSIONS[1].key), ("tpe", DIMENSIONS[2].key)])
@pytest.mark.usefixtures("in_memory")
def test_a_trial_that_was_half_drawn_gets_the_values_that_it_would_have_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampler: str, name: str
) -> None:
    write: Callable[..., Any] = optuna.storages.InMemoryStorage.set_trial_param

    def dying(self: Any, trial_id: int, key: str, *values: Any) -> None:
        if key == name:
            raise Killed
        write(self, trial_id, key, *values)

    whole = search(tmp_path / "whole", iter(()), sampler=sampler)
    with monkeypatch.context() as patch:
        patch.setattr(optuna.storages.InMemoryStorage, "set_trial_param", dying)
        with pytest.raises(Killed):
            take_up(tmp_path / "killed", *DIMENSIONS, num_trials=NUM_TRIALS, sampler=sampler).next()
    assert search(tmp_path / "killed", iter(()), sampler=sampler) == whole


NUM_MODELS, MAX_KILLS = 2, 200
WRITES = ("create_new_trial", "set_trial_param", "set_trial_state_values", "set_trial_user_attr", "set_study_user_attr")


class Writes:
    """Counts the writes into a study, and dies at one of them: before it, or after it."""

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
def writes(in_memory: None, monkeypatch: pytest.MonkeyPatch) -> Writes:
    """Watch the writes into a study."""
    found = Writes()
    for name in WRITES:
        write = getattr(optuna.storages.InMemoryStorage, name)
        monkeypatch.setattr(optuna.storages.InMemoryStorage, name, found.watched(write))
    monkeypatch.setattr("mlotool.sweep.study.MOST_IN_A_ROW", 4)
    return found


def one_of_two(words: Sequence[str], decide: Decide) -> dict[str, Any]:
    """Make one of two models: a, or b with one layer. With two layers b is none."""
    if decide("kind", ("a", "b")) == "b" and decide("depth", (1, 2)) == 2:
        raise InfeasibleModelError("two layers are too many")
    return {}


def is_killed(folder: Path, writes: Writes, dies_at: int, *, is_after: bool, **settings: Any) -> bool:
    """Search until a write, and go on; check what is left, and return whether there was such a write."""
    trained = Counter[tuple[str, ...]]()

    def job(folder: Path, spec: JobSpec) -> tuple[str, float]:
        trained[spec.words] += 1
        return "finished", float(len(trained))

    writes.start(dies_at, is_after=is_after)
    try:
        run(take_up(folder, draw=one_of_two, num_trials=12, **settings), folder, job)
        return False
    except Killed:
        writes.start(None)
    points = take_up(folder, draw=one_of_two, num_trials=12, **settings)
    run(points, folder, job)
    assert sorted(trained.values()) == [1] * NUM_MODELS
    assert {*states(folder)} <= {"COMPLETE", "FAIL"}
    jobs = [each for each in folder.iterdir() if each.name.isdigit()]
    assert len(jobs) == points.num_ended == points.total == NUM_MODELS + 1
    return True


EACH: list[dict[str, Any]] = [
    {"sampler": "brute_force"},
    {"sampler": "brute_force", "fuse": 3},
    {"sampler": "evolution"},
]


@pytest.mark.parametrize(
    ("settings", "is_after"),
    [
        *zip(EACH, (False, True, False), strict=True),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in zip(EACH, (True, False, True), strict=True)),
    ],
    ids=str,
)
def test_each_model_is_trained_once(tmp_path: Path, writes: Writes, is_after: bool, settings: dict[str, Any]) -> None:
    for dies_at in range(1, MAX_KILLS):
        if not is_killed(tmp_path / str(dies_at), writes, dies_at, is_after=is_after, **settings):
            # It begins and ends three trials, of two decisions at most.
            assert dies_at > 12
            return
    raise AssertionError("the search has not ended")


@pytest.mark.parametrize(("place", "storage"), [("with a space", None), ("other", "sqlite:///{}/all.db")])
def test_a_folder_that_was_moved_is_gone_on_with(tmp_path: Path, place: str, storage: str | None) -> None:
    first, new, trained = tmp_path / "first", tmp_path / place, list[str]()
    settings = {} if storage is None else {"storage": storage.format(tmp_path)}

    def begin(resume: str | None, dies_at: int | None) -> None:
        def job(folder: Path, spec: JobSpec) -> tuple[str, float]:
            if int(folder.name) == dies_at:
                raise Killed
            trained.append(folder.name)
            return rate(folder, spec)

        plan = make_plan(first, Dimension("lr", low=1e-3, high=1.0), num_trials=5, method="optuna", **settings)
        folder, is_resumed = choose_folder(plan, resume)
        found = folder.path
        with suppress(Killed):
            run(StudyPoints(plan, found, known(found, is_resumed=is_resumed)), found, job)

    begin(None, 3)
    first.rename(new)
    begin(str(new), None)
    assert trained == ["0", "1", "2", "3", "4"]
    watched, url = read_job(new / "4").study, settings.get("storage") or f"sqlite:///{new / 'study.db'}"
    assert watched is not None and watched["url"] == url
    [study] = optuna.get_all_study_summaries(url)
    assert (study.study_name, study.n_trials) == ("first", 5)
