"""Processes that load data and end before their time: others take their place, with the same samples."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from mlotool.core.errors import RunError
from mlotool.problem.stream import Stream

SIZE = 12


class Data:
    """Ends the process that reads a sample, in a worker and as often as it is told."""

    def __init__(self, end: Callable[[], Any], folder: Path, at: int = 5, times: int = 1) -> None:
        self.end, self.folder, self.at, self.times, self.home = end, folder, at, times, os.getpid()

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if os.getpid() != self.home and index == self.at:
            ended = len(list(self.folder.iterdir()))
            if ended < self.times:
                (self.folder / str(ended)).touch()
                self.end()
        return {"input": index + torch.rand(2)}


@pytest.fixture(autouse=True)
def _is_soon_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch looks every five seconds whether the workers are there."""
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.2,))


ENDS: dict[str, Callable[[], Any]] = {
    "kill -9": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exit code 0": lambda: os._exit(0),
}


def values(stream: Stream, count: int = 10) -> list[list[list[float]]]:
    return [stream.next()["input"].tolist() for _ in range(count)]


@pytest.mark.parametrize("name", ENDS)
def test_the_batches_are_those_that_they_would_have_been(tmp_path: Path, name: str) -> None:
    whole = values(Stream(Data(ENDS[name], tmp_path), 3, seed=4), 6)
    with pytest.warns(UserWarning, match="was ended from outside.*another one loads the same samples") as caught:
        found = values(Stream(Data(ENDS[name], tmp_path), 3, seed=4, num_workers=2), 6)
    assert found == whole
    assert len(caught) == 1


def test_one_that_ends_again_at_the_same_batch_is_an_error(tmp_path: Path) -> None:
    stream = Stream(Data(ENDS["kill -9"], tmp_path, at=0, times=9), 3, shuffle=False, num_workers=1)
    with (
        pytest.warns(UserWarning, match="was ended from outside"),
        pytest.raises(RunError, match=r"loads Data was ended from outside, and so was .*resume=auto"),
    ):
        stream.next()
