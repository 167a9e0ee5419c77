"""A rehearsal changes no bit of a run, whatever the problems keep."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import mlotool
from mlotool.program import Stream
from mlotool.runner.checkpoint import STATE_KEY, read_whole_checkpoint
from mlotool.runner.plan import Objective
from mlotool.runner.rehearsal import rehearse
from mlotool.runner.session import Session
from tests.runner.tiny import Blobs, make_built

QUIET = ["debug=fast", "logger.wandb=false", "runner.progress_bar=false", "runner.report=false"]


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list | tuple):
        for name, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(each, f"{key}.{name}")
    elif not key.endswith("training_s"):
        yield key, value


def _run(folder: Path, words: list[str]) -> tuple[dict[str, float], dict[str, Any]]:
    result = mlotool.run(mlotool.compose(words[0], [*words[1:], *QUIET]), output_dir=folder)
    state = read_whole_checkpoint(folder / "checkpoints" / "last.ckpt")[STATE_KEY]
    return result.metrics, dict(_leaves(state))


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    ["mwn", "mwn hypergradient=penalty", "mwn hypergradient=unrolled", "multigrid_peaks", "layerparallel_penalty"],
)
def test_a_rehearsal_leaves_no_trace(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics, state = _run(tmp_path / "rehearsed", words.split())
    monkeypatch.setattr(Session, "rehearse", lambda self: None)
    other_metrics, other_state = _run(tmp_path / "plain", words.split())
    assert metrics == other_metrics
    assert state.keys() == other_state.keys()
    for key, value in state.items():
        other = other_state[key]
        assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other, key


@dataclass
class Noisy:
    """Adds noise to each sample."""

    draw: Callable[[], float]
    blobs: Blobs = field(default_factory=lambda: Blobs(40, 0))

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**self.blobs[index], "input": self.blobs.input[index] + self.draw()}


def _rehearse(draw: Callable[[], float]) -> None:
    program = make_built().program
    program.problems["weights"].stream = Stream(Noisy(draw), batch_size=8)
    rehearse(program, None, (), Objective(None, None, is_tracked=False), lambda: None)


def test_samples_that_no_seed_makes_the_same_are_told() -> None:
    for draw in (numpy.random.rand, random.random, lambda: torch.rand(()).item(), lambda: 1.0):
        _rehearse(draw)
    for draw in (lambda: numpy.random.default_rng().random(), numpy.random.default_rng(0).random):
        with pytest.warns(UserWarning, match=r"problems\.weights\.stream: a sample was another one when it was read"):
            _rehearse(draw)
