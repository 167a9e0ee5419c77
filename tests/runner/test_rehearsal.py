"""A rehearsal changes no bit of a run, whatever the problems keep."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import mlotool
from mlotool.runner.checkpoint import STATE_KEY, read_whole_checkpoint
from mlotool.runner.session import Session

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
    [
        ["mwn"],
        ["mwn", "hypergradient=penalty"],
        ["mwn", "hypergradient=unrolled"],
        ["multigrid_peaks"],
        ["layerparallel_penalty"],
    ],
    ids=" ".join,
)
def test_a_rehearsal_leaves_no_trace(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics, state = _run(tmp_path / "rehearsed", words)
    monkeypatch.setattr(Session, "rehearse", lambda self: None)
    other_metrics, other_state = _run(tmp_path / "plain", words)
    assert metrics == other_metrics
    assert state.keys() == other_state.keys()
    for key, value in state.items():
        other = other_state[key]
        assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other, key
