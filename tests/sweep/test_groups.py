"""Which jobs share a process, and that they share it again when the sweep goes on."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mlotool.config.sweep_plan import Dimension
from mlotool.core.errors import ConfigError
from mlotool.sweep.driver import Sweep, run_jobs
from mlotool.sweep.job_folder import JobSpec, read_job
from mlotool.sweep.launchers import AbstractHandle, Ending
from mlotool.sweep.points import GridPoints, Point, grouped
from tests.sweep.plans import SHARED, known, make_plan, run, words_of

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


def test_auto_takes_as_many_as_there_are() -> None:
    many = Dimension("seed", tuple(map(str, range(100))))
    settings = partial(make_plan, Path("x"), SEEDS)
    assert settings(fuse="auto").group_size == 5
    assert settings(fuse="auto", workers=2).group_size == 3
    assert replace(settings(fuse="auto"), dimensions=(many,)).group_size == 32
    # A search looks at the jobs of a round before it draws the next.
    assert settings(fuse="auto", method="optuna", num_trials=20).group_size == 5
    assert settings(fuse="auto", method="optuna", num_trials=2).group_size == 1
    assert replace(settings(fuse=4), devices_per_job=2).group_size == 1
    assert settings(fuse=4).group_size == 4


def finished(folder: Path, spec: JobSpec) -> tuple[str, float]:
    return "finished", float(words_of(spec)["seed"])


class Slow(AbstractHandle):
    """A process whose jobs end one at each look; it dies before it comes to the last."""

    def __init__(self, folders: Sequence[Path], *, is_killed: bool) -> None:
        self.folders, self.is_killed = [*folders], is_killed

    def is_done(self) -> bool:
        if len(self.folders) > 1:
            (self.folders.pop(0) / "summary.json").write_text('{"status": "finished"}')
            return False
        return True

    def stop(self) -> None:
        raise AssertionError("nothing runs")

    def ending(self) -> Ending:
        return Ending("it was made to die", self.is_killed)


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_job_ends_before_its_group(tmp_path: Path, is_killed: bool) -> None:
    plan, announced = make_plan(tmp_path, SEEDS, fuse=3), list[tuple[int, str]]()
    workers, used, status = [{"worker": "a"}, {"worker": "b"}], list[Any](), "interrupted" if is_killed else "failed"

    def launcher(folders: Sequence[Path], environment: Mapping[str, str]) -> Slow:
        used.append(environment)
        return Slow(folders, is_killed=is_killed)

    sweep = Sweep(tmp_path, SHARED, lambda point, outcome: announced.append((point.number, outcome.status)))
    run_jobs(GridPoints(plan, tmp_path, known(tmp_path)), launcher, workers, sweep)
    assert used == workers
    assert announced == [(0, "finished"), (3, "finished"), (1, "finished"), (4, status), (2, status)]
    error = json.loads((tmp_path / "2" / "summary.json").read_text())["error"]
    log = tmp_path / "fusion" / "0.log"
    advice = " With resume=auto it goes on." if is_killed else ""
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
