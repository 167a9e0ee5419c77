"""Groups of runs that are killed with SIGKILL at random moments, and go on until all are done."""

import contextlib
import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from mlotool.core.run_files import read_json
from mlotool.fusion import stacked_gradients
from mlotool.runner import RunResult, checkpoint, run_config
from mlotool.runner.together import RunRequest, run_together
from tests.fusion.members import Blobs, bilevel, network
from tests.runner.test_kills import WHOLE_S, kill_at_random, slow_down
from tests.runner.test_resume import assert_same
from tests.runner.tiny import Built, make_config

MAX_TICKS = 24
RATE = "problems.classifier.optimizer.lr"
DELAY_S = 0.002
CHANGES: list[dict[str, Any]] = [
    {},
    # Ends early, so that its lane is empty from then on.
    {"runner.max_ticks": 7},
    # Fails at the end of a window.
    {RATE: 1e30},
    # With the two before, half of the lanes are empty, and the others move together.
    {"runner.max_ticks": 16},
]


class Data:
    """Small splits."""

    splits = ("train", "meta", "val", "test")
    num_classes = 3

    def split(self, name: str) -> Blobs:
        return Blobs(20, self.splits.index(name))


def build(config: Any, reduce: Any = None, shared: Any = None) -> Built:
    """Return the program of a run, in float64."""
    scheduler = partial(torch.optim.lr_scheduler.StepLR, step_size=5, gamma=0.5)
    optimizer = partial(torch.optim.SGD, lr=config.problems.classifier.optimizer.lr, momentum=0.9)
    norm = torch.nn.BatchNorm1d
    program = bilevel(config.seed, lambda: network(norm(8)), optimizer=optimizer, scheduler=scheduler)
    return Built(program, Data())


def requests(folder: Path) -> list[RunRequest]:
    """Return the runs of a folder, of which some may have ended."""
    found = []
    for number, own in enumerate(CHANGES):
        changes = {"seed": number, "runner.max_ticks": MAX_TICKS, "runner.log_every": 5, RATE: 0.1}
        config = make_config(**{**changes, "runner.checkpoint_seconds": 1e-9, **own})
        summary = read_json(folder / str(number), "summary.json")
        ended_at = None if summary is None else summary["num_ticks"]
        found.append(RunRequest(config, folder / str(number), resume="auto", ended_at=ended_at))
    return found


def train(folder: Path, begun: Path) -> None:
    """Run a group in `folder`, or go on there; `begun` is a sign."""
    use_small_runs()
    slow_down(DELAY_S)
    folder.mkdir(parents=True, exist_ok=True)
    begun.touch()
    with (folder.parent / "output.txt").open("a") as output, contextlib.redirect_stderr(output):
        ended: dict[int, RunResult | BaseException] = {}
        run_together(requests(folder), record=folder / "fusion" / "0.json", when_ended=ended.__setitem__)
        print(ended, file=output)


def use_small_runs() -> None:
    """Let runs be small, and one program of all count as the faster way, whatever the clock says."""
    run_config.build = build  # type: ignore[assignment]
    checkpoint.LARGEST_SHARE_OF_TIME = float("inf")
    stacked_gradients._fastest = _untimed


def _untimed(take: Callable[[], Any], before: Callable[[], None]) -> tuple[float, Any]:
    before()
    return 0.0, take()


@pytest.mark.parametrize("num_kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_groups_end_as_if_nothing_had_been(tmp_path: Path, num_kills: int) -> None:
    chance = random.Random(num_kills)
    whole = tmp_path / "whole" / "runs"
    *_, seconds = kill_at_random(train, whole, chance, 0, WHOLE_S)
    [stack] = json.loads((whole / "fusion" / "0.json").read_text())["stacks"]
    assert stack["jobs"] == list(range(len(CHANGES)))
    assert all(each["is_fused"] for each in stack["rounds"].values())
    ends = [json.loads((whole / str(number) / "summary.json").read_text()) for number in range(len(CHANGES))]
    assert [each["status"] for each in ends] == ["finished", "finished", "failed", "finished"]
    assert [each["num_ticks"] for each in ends] == [MAX_TICKS, 7, ends[2]["num_ticks"], 16]
    kills = num_chains = 0
    while kills < num_kills:
        folder = tmp_path / f"chain_{num_chains}" / "runs"
        more, *_ = kill_at_random(train, folder, chance, num_kills - kills, 0.8 * seconds)
        kills, num_chains = kills + more, num_chains + 1
        for number, end in enumerate(ends):
            if end["status"] == "finished":
                assert_same(folder / str(number), whole / str(number))
        found = json.loads((folder / "2" / "summary.json").read_text())
        assert found["error"].replace(str(folder), "") == ends[2]["error"].replace(str(whole), "")
        assert (folder / "2" / "metrics.csv").read_bytes() == (whole / "2" / "metrics.csv").read_bytes()
