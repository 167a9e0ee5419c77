"""A checkpoint's state is complete: going on from it gives the run that was never interrupted."""

import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from mlotool.core.errors import NonFiniteLossError
from mlotool.runner.checkpoint import read_checkpoint
from mlotool.runner.folder import RunFolder
from mlotool.runner.random_state import random_state, restore_random_state
from mlotool.runner.session import Session
from mlotool.runner.surroundings import quiet_lightning
from tests.runner.test_running import LossThat, read_metrics
from tests.runner.tiny import make_built, make_config


def halve(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 7, gamma=0.5)


def train(path: Path, resume_from: Path | None = None, **changes: Any) -> RunFolder:
    config = make_config(**changes)
    torch.manual_seed(5 if resume_from else 0)
    folder = RunFolder(path) if resume_from else RunFolder.create(config, path)
    with quiet_lightning():
        session = Session(
            config,
            make_built(scheduler=halve),
            torch.device("cpu"),
        )
        session.run(folder, resume_from)
    return folder


@pytest.mark.parametrize("stop", [10, 20, 25])
def test_a_resumed_run_is_bit_identical(tmp_path: Path, stop: int) -> None:
    whole = train(tmp_path / "whole", **{"runner.max_ticks": 40})
    parts = train(tmp_path / "parts", **{"runner.max_ticks": stop})
    train(parts.path, parts.checkpoint("last"), **{"runner.max_ticks": 40})
    expected, found = read_metrics(whole.path), read_metrics(parts.path)
    assert [row for row in found if row[0] > stop] == [row for row in expected if row[0] > stop]
    a, b = (read_checkpoint(folder.checkpoint("last")) for folder in (whole, parts))
    assert a["tick"] == b["tick"] == 40
    for problem, state in a["program"].items():
        for key, tensor in state["module"].items():
            assert torch.equal(tensor, b["program"][problem]["module"][key]), (problem, key)


def test_a_run_that_is_resumed_from_its_start_is_bit_identical(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole")
    start = RunFolder.create(make_config(), tmp_path / "start")
    nan = LossThat(1, lambda loss: loss * float("nan"))
    torch.manual_seed(0)
    with quiet_lightning(), pytest.raises(NonFiniteLossError):
        Session(make_config(), make_built(nan, scheduler=halve), torch.device("cpu")).run(start)
    train(tmp_path / "start", start.checkpoint("last"))
    assert read_metrics(start.path) == read_metrics(whole.path)


def test_random_states_come_back(tmp_path: Path) -> None:
    state = random_state()
    path = tmp_path / "state.pt"
    torch.save(state, path)
    drawn = torch.rand(3).tolist(), numpy.random.rand(3).tolist(), [random.random(), random.gauss(0, 1)]
    restore_random_state(torch.load(path, weights_only=True))
    assert drawn == (torch.rand(3).tolist(), numpy.random.rand(3).tolist(), [random.random(), random.gauss(0, 1)])
