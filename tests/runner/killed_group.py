"""Runs that share a process, which is slow at what a kill may meet."""

import contextlib
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mlotool.core import files
from mlotool.core.run_files import read_json
from mlotool.fusion import comparison
from mlotool.runner import RunResult, checkpoint, run_config
from mlotool.runner.together import RunRequest, run_together
from tests.fusion.members import Blobs, bilevel, network
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


def train(folder: Path, begun: Path, *, is_slow: bool = True) -> None:
    """Run a group in `folder`, or go on there; `begun` is a sign."""
    use_small_runs()
    if is_slow:
        _slow_down()
    begun.touch()
    with (folder.parent / "output.txt").open("a") as output, contextlib.redirect_stderr(output):
        ended: dict[int, RunResult | BaseException] = {}
        run_together(requests(folder), record=folder / "fusion" / "0.json", when_ended=ended.__setitem__)
        print(ended, file=output)


def use_small_runs() -> None:
    """Let runs be small, and one program of all count as the faster way, whatever the clock says."""
    run_config.build = build  # type: ignore[assignment]
    checkpoint.LARGEST_SHARE_OF_TIME = float("inf")
    comparison._fastest = _untimed


def _untimed(take: Callable[[], Any], before: Callable[[], None]) -> tuple[float, Any]:
    before()
    return 0.0, take()


def _slow_down() -> None:
    sync = files.sync

    def sync_slowly(path: Path) -> None:
        time.sleep(DELAY_S)
        sync(path)
        time.sleep(DELAY_S)

    files.sync = sync_slowly
