"""A recipe whose text transformer is evaluated again in backward passes, from the command line."""

import logging
from pathlib import Path

import pytest

from mlotool.cli.main import main
from mlotool.runner import load
from tests.runner.test_run_config import read_metrics


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_has_the_metrics_of_one_without_it(
    num_ranks: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def metrics(remat: str) -> dict[tuple[int, str], float]:
        folder = tmp_path / remat
        overrides = [f"problems.classifier.remat={remat}", f"runner.devices={num_ranks}", f"hydra.run.dir={folder}"]
        more = ["problems.classifier.module.num_layers=2", "runner.accelerator=cpu", "debug=fast", "logger.wandb=false"]
        assert main(["run", "+recipe=mwn_text", *overrides, *more]) == 0
        return {(tick, key): value for tick, key, value in read_metrics(folder)}

    caplog.set_level(logging.INFO, "mlotool")
    ours, its = metrics("auto"), metrics("null")
    said = [each for each in caplog.messages if "remat" in each]
    # Of two ranks each is a process of its own.
    assert num_ranks > 1 or said == ["problems.classifier.remat: auto found 2 blocks, blocks.0 to blocks.1."]
    assert ours.keys() == its.keys()
    assert ours == pytest.approx(its, rel=1e-5, abs=1e-6)
    # The module alone is saved: it needs none of this to be loaded.
    states = [load(tmp_path / remat, "classifier").state_dict() for remat in ("auto", "null")]
    assert list(states[0]) == list(states[1])
