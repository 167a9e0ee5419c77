"""A finished run's modules and metrics."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mlotool.core.errors import ConfigError, RunError
from mlotool.runner import RunResult, evaluate, load
from mlotool.runner.checkpoint import read_checkpoint

Run = Callable[..., RunResult]


@pytest.mark.parametrize("which", ["best", "last"])
def test_load_gives_the_module_of_the_checkpoint(tiny_run: Run, which: str) -> None:
    run_dir = tiny_run().output_dir
    saved = read_checkpoint(run_dir / f"checkpoints/{which}.ckpt")["program"]["classifier"]["module"]
    module = load(run_dir, "classifier", which)
    assert not module.training
    assert all(torch.equal(value, saved[key]) for key, value in module.state_dict().items())


def test_evaluate_repeats_the_runs_numbers(tiny_run: Run) -> None:
    result = tiny_run()
    values = evaluate(result.output_dir, "test")
    assert values == {key: result.metrics[key] for key in ("test/accuracy", "test/cross_entropy")}
    assert set(evaluate(result.output_dir, "meta", "last")) == {"meta/accuracy", "meta/cross_entropy"}


def test_wrong_names(tiny_run: Run) -> None:
    run_dir = tiny_run({"debug.limit_ticks": 2, "objective": None}).output_dir
    with pytest.raises(ConfigError, match=r"Unknown problem 'clasifier'.*Did you mean 'classifier'"):
        load(run_dir, "clasifier", "last")
    with pytest.raises(ConfigError, match=r"no checkpoint 'best', but last"):
        load(run_dir, "classifier")
    with pytest.raises(ConfigError, match=r"found 'tests'.*Did you mean 'test'"):
        evaluate(run_dir, "tests", "last")


def test_an_override_replaces_a_list_whole(tiny_run: Run) -> None:
    run_dir = tiny_run().output_dir
    assert set(evaluate(run_dir, "test", overrides=["evaluate.metrics=[f1]"])) == {"test/f1"}
    with pytest.raises(ConfigError, match=r"'evaluate\.metrics=f1'; expected a list, as .* has there"):
        evaluate(run_dir, "test", overrides=["evaluate.metrics=f1"])


def test_it_says_why_there_is_no_checkpoint(tiny_run: Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no folder 'nowhere'; expected that of a run"):
        load("nowhere", "classifier")
    with pytest.raises(ConfigError, match=r"has no config\.yaml; expected the folder of a run"):
        evaluate(tmp_path, "test")
    run_dir = tiny_run({"runner.checkpoint": False}).output_dir
    with pytest.raises(ConfigError, match=r"no checkpoint 'best', but none"):
        load(run_dir, "classifier")


def test_a_foreign_checkpoint_is_refused(tmp_path: Path) -> None:
    torch.save({"state_dict": {}}, tmp_path / "best.ckpt")
    with pytest.raises(RunError, match=r"is not a checkpoint of mlotool"):
        read_checkpoint(tmp_path / "best.ckpt")
