"""The folders of a sweep and of its jobs, which jobs share a process, and the devices of its workers."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlotool.config.sweeps.sweep_plan import Dimension, SweepPlan
from mlotool.core.errors import ConfigError
from mlotool.folders.sweep_folder import SweepFolder
from mlotool.sweep.driver import Ending, Handle, run_jobs, worker_devices, worker_environments
from mlotool.sweep.folder import JobOutcome, JobSpec, choose_folder, note_failure, read_job, read_outcome
from mlotool.sweep.points import GridPoints, Point, grouped
from tests.sweep.plans import SHARED, Killed, known, make_plan, run, words_of

RATE = "problems.classifier.optimizer.lr"
SEEDS = Dimension("seed", tuple(map(str, range(5))))


def numbers(size: int, *words: Sequence[str]) -> list[list[int]]:
    points = [Point(number, tuple(each)) for number, each in enumerate(words)]
    return [[point.number for point in group.points] for group in grouped(points, size)]


ALIKE = (
    "seed",
    "data.seed",
    RATE,
    "problems.classifier.optimizer",
    "optimizer@problems.classifier.optimizer",
    "+problems.classifier.scheduler.gamma",
    "problems.classifier.gradient_clip_norm",
    "problems.classifier.loss.temperature",
    "runner.max_ticks",
)
UNLIKE = {
    "hypergradient": ("cg", "neumann"),
    "problems.classifier.unroll_steps": ("1", "2"),
    "problems.classifier.loss.reduction": ("sum", "mean"),
    "model@problems.classifier.module": ("mlp", "resnet"),
    "problems.classifier.module.width": ("1", "2"),
}


def test_jobs_of_one_structure_come_together() -> None:
    for key in ALIKE:
        words = [(data, f"{key}={value}") for value in ("1", "2.5e-3") for data in ("data=a", "data=b")]
        assert numbers(2, *words) == [[0, 2], [1, 3]], key
    for key, values in UNLIKE.items():
        words = [(f"seed={seed}", f"{key}={value}") for seed in range(2) for value in values]
        assert numbers(2, *words) == [[0, 2], [1, 3]], key


def test_a_group_is_filled_with_what_has_room() -> None:
    """Full groups first; what is left of a structure stays together."""
    counts = {"a": 5, "b": 2, "c": 3}
    words = [(f"data={data}", f"seed={seed}") for data, count in counts.items() for seed in range(count)]
    assert numbers(4, *words) == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert numbers(100, *words) == [list(range(10))]
    assert numbers(1, *words) == [[number] for number in range(10)]


def finished(folder: Path, spec: JobSpec) -> tuple[str, float]:
    return "finished", float(words_of(spec)["seed"])


def slow(folders: Sequence[Path], *, is_killed: bool) -> Handle:
    """Return a process whose jobs end one at each look; it dies before it comes to the last."""
    left = [*folders]

    def is_done() -> bool:
        if len(left) > 1:
            (left.pop(0) / "summary.json").write_text('{"status": "finished"}')
            return False
        return True

    return Handle(is_done, lambda: 1 / 0, lambda: Ending("it was made to die", is_killed))


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_job_ends_before_its_group(tmp_path: Path, is_killed: bool) -> None:
    plan, announced = make_plan(tmp_path, SEEDS, fuse=3), list[tuple[int, str]]()
    workers, used, status = [{"worker": "a"}, {"worker": "b"}], list[Any](), "interrupted" if is_killed else "failed"

    def launcher(folders: Sequence[Path], environment: Mapping[str, str]) -> Handle:
        used.append(environment)
        return slow(folders, is_killed=is_killed)

    points = GridPoints(plan, tmp_path, known(tmp_path))
    run_jobs(
        points, launcher, workers, tmp_path, SHARED, lambda *ended: announced.append((ended[0].number, ended[1].status))
    )
    assert used == workers
    assert announced == [(0, "finished"), (3, "finished"), (1, "finished"), (4, status), (2, status)]
    error = json.loads((tmp_path / "2" / "summary.json").read_text())["error"]
    log = tmp_path / "fusion" / "0.log"
    advice = " It can be resumed with resume=auto." if is_killed else ""
    assert error == f"The job left no summary: it was made to die. Read {log}.{advice}"
    assert GridPoints(plan, tmp_path, known(tmp_path)).num_ended == (3 if is_killed else 5)


def test_a_sweep_that_goes_on_has_the_same_groups(tmp_path: Path) -> None:
    """Whatever its size is now; jobs that had ended keep their places, and what they are is written anew."""

    def dies_at_three(folder: Path, spec: JobSpec) -> tuple[str, float]:
        if folder.name == "3":
            raise KeyboardInterrupt
        return finished(folder, spec)

    plan = make_plan(tmp_path, Dimension("seed", tuple(map(str, range(8)))), fuse=3)
    with pytest.raises(KeyboardInterrupt):
        run(GridPoints(plan, tmp_path, known(tmp_path)), tmp_path, dies_at_three)
    for number in (0, 4):
        (tmp_path / str(number) / "job.json").write_text('{"words": ["data._target_=os.system"], "trusted": ["os"]}')
    (tmp_path / "4" / "summary.json").write_text('{"status": "pruned"}')
    (tmp_path / "3" / "summary.json").write_text('{"status": "interrupted"}')
    again = replace(plan, settings={**plan.settings, "fuse": 2})
    points = GridPoints(again, tmp_path, known(tmp_path))
    assert points.num_ended == 4
    launcher = run(points, tmp_path, finished)
    assert launcher.groups == [["3", "4", "5"], ["6", "7"]]
    assert launcher.started == ["3", "5", "6", "7"]
    assert read_job(tmp_path / "4").words == ("+recipe=plain", "seed=4")
    assert GridPoints(again, tmp_path, known(tmp_path)).next() is None


@pytest.mark.parametrize("content", ["[[0, 1]]", '{"groups": [[0, 1], [1, 2]]}', '{"groups": [[0, 5]]}', "no JSON"])
def test_groups_of_a_stranger_are_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "groups.json").write_text(content)
    with pytest.raises(ConfigError, match=r"resume: found .*groups\.json.*expected the groups of jobs"):
        GridPoints(make_plan(tmp_path, SEEDS), tmp_path, known(tmp_path))


SEED = Dimension("seed", ("1", "2"))


def _chosen(plan: SweepPlan, resume: str | None) -> tuple[Path, bool]:
    folder, is_resumed = choose_folder(plan, resume)
    return folder.path, is_resumed


def test_which_sweep_is_gone_on_with(tmp_path: Path) -> None:
    """With auto the newest folder of the same sweep, or the one that was named."""
    for name in ("a", "b"):
        assert _chosen(make_plan(tmp_path / name, SEED), None) == (tmp_path / name, False)
    choose_folder(make_plan(tmp_path / "c", Dimension("seed", ("1", "3"))), None)
    again = make_plan(tmp_path / "d", SEED, workers=2)
    assert _chosen(again, "auto") == (tmp_path / "b", True)
    assert _chosen(make_plan(tmp_path / "a", SEED), "auto") == (tmp_path / "a", True)
    assert _chosen(make_plan(tmp_path / "e", Dimension("seed", ("7",))), "auto") == (tmp_path / "e", False)
    # A broken file is that of another sweep.
    (tmp_path / "b" / "sweep.json").write_text('{"identity": {"fix')
    assert _chosen(again, "auto") == (tmp_path / "a", True)
    other = replace(again, fixed=("+recipe=plain", "seed=9"))
    with pytest.raises(ConfigError, match=r"resume: found fixed = .*seed=9.*Repeat the command"):
        choose_folder(other, str(tmp_path / "a"))
    with pytest.raises(ConfigError, match="resume: found fixed = "):
        choose_folder(replace(other, folder=tmp_path / "a"), "auto")
    with pytest.raises(ConfigError, match=r"resume: found '.*', which has no sweep.json; expected the folder of"):
        choose_folder(again, str(tmp_path))
    with pytest.raises(ConfigError, match="holds a sweep already"):
        choose_folder(make_plan(tmp_path / "a", SEED), None)


def test_a_grid_goes_on_for_longer_and_a_study_does_not(tmp_path: Path) -> None:
    for method, is_gone_on_with in (("grid", True), ("optuna", False)):
        plan = replace(make_plan(tmp_path / method / "a", SEED, method=method), fixed=("runner.max_ticks=5",))
        choose_folder(plan, None)
        longer = replace(plan, fixed=("runner.max_ticks=9", "runner.report=false"), folder=tmp_path / method / "b")
        assert _chosen(longer, "auto") == (tmp_path / method / "ab"[not is_gone_on_with], is_gone_on_with)
        other = replace(longer, fixed=("runner.max_ticks=9", "data=mnist"), folder=tmp_path / method / "c")
        assert _chosen(other, "auto") == (other.folder, False)


def test_finished_jobs_of_a_grid_are_run_for_longer(tmp_path: Path) -> None:
    """But not one that had stopped early, nor one that failed."""
    plan = make_plan(tmp_path, Dimension("seed", ("1", "2", "3")))
    for number, (status, num_ticks) in enumerate((("finished", 5), ("finished", 4), ("failed", 5))):
        (tmp_path / str(number)).mkdir()
        (tmp_path / f"{number}/summary.json").write_text(json.dumps({"status": status, "num_ticks": num_ticks}))
        (tmp_path / f"{number}/config.yaml").write_text("runner: {max_ticks: 5}")
    for last_tick, waiting in ((9, ["0"]), (5, []), (3, []), (None, [])):
        points = GridPoints(replace(plan, last_tick=last_tick), tmp_path, known(tmp_path))
        found = list(iter(points.next, None))
        assert [[str(point.number) for point in group.points] for group in found if group] == [waiting][: len(waiting)]
        assert points.num_ended == 3 - len(waiting)


def test_two_processes_do_not_share_a_folder(tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path)
    with folder.locked(), pytest.raises(ConfigError, match="still running"), folder.locked():
        pass
    with folder.locked():
        pass


@pytest.mark.parametrize(("name", "resume"), [("checkpoints/last.ckpt", None), ("notes.txt", "auto")])
def test_a_folder_with_files_is_no_jobs(tmp_path: Path, name: str, resume: str | None) -> None:
    """It would be gone on with as the job's own run, or be removed."""
    path = tmp_path / "a" / "3" / name
    path.parent.mkdir(parents=True)
    path.touch()
    with pytest.raises(ConfigError, match=r"found .*a/3, the folder of a job, which has files already"):
        choose_folder(make_plan(tmp_path / "a", SEED), resume)
    assert path.exists() and not (tmp_path / "a" / "sweep.json").exists()


def test_a_job_that_is_refused_has_ended_only_when_all_of_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies_before(path: Path, text: str) -> None:
        if path.name == "summary.json":
            raise Killed
        path.write_text(text)

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr("mlotool.folders.run_folder.write_text", dies_before)
        note_failure(tmp_path / "0", ("seed=1",), "it does not fit", "infeasible")
    assert (tmp_path / "0" / "overrides.txt").read_text() == "seed=1\n"
    assert read_outcome(tmp_path / "0").status == "unfinished"
    note_failure(tmp_path / "0", ("seed=1",), "it does not fit", "infeasible")
    assert read_outcome(tmp_path / "0") == JobOutcome("infeasible", None, "it does not fit")


def test_workers_take_devices_in_turn(tmp_path: Path) -> None:
    four = ["0", "1", "2", "3"]
    assert worker_devices(four, 2, per_job=2, jobs_per_device=1) == [["0", "1"], ["2", "3"]]
    assert worker_devices(four, 6, per_job=1, jobs_per_device=2) == [["0"], ["1"], ["2"], ["3"], ["0"], ["1"]]
    assert worker_devices([], 3, per_job=1, jobs_per_device=1) == [[], [], []]
    with pytest.raises(ConfigError, match=r"found 3 with .* 0, 1.*Set sweep\.workers=2, or sweep\.jobs_per_device=2"):
        worker_devices(["0", "1"], 3, per_job=1, jobs_per_device=1)
    with pytest.raises(ConfigError, match=r"Set runner\.devices=1\."):
        worker_devices(["0"], 3, per_job=2, jobs_per_device=1)

    plan, one_thread = make_plan(tmp_path, SEED, workers=2), {"OMP_NUM_THREADS": "1"}
    found = worker_environments(plan, {"CUDA_VISIBLE_DEVICES": "3,4", **one_thread})
    assert found == [{"CUDA_VISIBLE_DEVICES": "3"}, {"CUDA_VISIBLE_DEVICES": "4"}]
    found = worker_environments(make_plan(tmp_path, SEED, workers=2, devices=["0", "1"]), one_thread)
    assert [each["CUDA_VISIBLE_DEVICES"] for each in found] == ["0", "1"]
    on_cpu = worker_environments(replace(plan, accelerator="cpu"), {"CUDA_VISIBLE_DEVICES": "3"})
    assert [list(each) for each in on_cpu] == [["OMP_NUM_THREADS"]] * 2
