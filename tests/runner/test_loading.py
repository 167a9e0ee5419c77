"""A recipe from its name to a module of the finished run; what is refused of calls."""

import json
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import mlotool
from mlotool import RunResult, compose, load, run
from mlotool.config import find_recipe
from mlotool.config.composition import origin_of
from mlotool.core.errors import ConfigError, RunError
from mlotool.runner import evaluate
from mlotool.runner.checkpoint import read_checkpoint
from tests.runner.tiny import make_config

Run = Callable[..., RunResult]


def test_a_finished_run_gives_its_modules_and_repeats_its_numbers(tiny_run: Run) -> None:
    result = tiny_run()
    run_dir = result.output_dir
    for which in ("best", "last"):
        saved = read_checkpoint(run_dir / f"checkpoints/{which}.ckpt")["program"]["classifier"]["module"]
        module = load(run_dir, "classifier", which)
        assert not module.training
        assert all(torch.equal(value, saved[key]) for key, value in module.state_dict().items())
    values = evaluate(run_dir, "test")
    assert values == {key: result.metrics[key] for key in ("test/accuracy", "test/cross_entropy")}
    assert set(evaluate(run_dir, "meta", "last")) == {"meta/accuracy", "meta/cross_entropy"}
    assert set(evaluate(run_dir, "test", overrides=["evaluate.metrics=[f1]"])) == {"test/f1"}
    with pytest.raises(ConfigError, match=r"'evaluate\.metrics=f1'; expected a list, as .* has there"):
        evaluate(run_dir, "test", overrides=["evaluate.metrics=f1"])


def test_wrong_names(tiny_run: Run, tmp_path: Path) -> None:
    run_dir = tiny_run({"debug.limit_ticks": 2, "objective": None}).output_dir
    bare = tiny_run({"debug.limit_ticks": 2, "runner.checkpoint": False}, folder="bare").output_dir
    (tmp_path / "empty").mkdir()
    for call, text in (
        (lambda: load(run_dir, "clasifier", "last"), r"Unknown problem 'clasifier'.*Did you mean 'classifier'"),
        (lambda: load(run_dir, "classifier"), r"no checkpoint 'best', but last"),
        (lambda: load(bare, "classifier"), r"no checkpoint 'best', but none"),
        (lambda: evaluate(run_dir, "tests", "last"), r"found 'tests'.*Did you mean 'test'"),
        (lambda: load("nowhere", "classifier"), r"no folder 'nowhere'; expected that of a run"),
        (lambda: evaluate(tmp_path / "empty", "test"), r"has no config\.yaml; expected the folder of a run"),
    ):
        with pytest.raises(ConfigError, match=text):
            call()  # type: ignore[no-untyped-call]
    torch.save({"state_dict": {}}, tmp_path / "best.ckpt")
    with pytest.raises(RunError, match=r"is not a checkpoint of mlotool"):
        read_checkpoint(tmp_path / "best.ckpt")


def test_a_recipe_runs_and_its_folder_knows_where_its_config_came_from(tmp_path: Path) -> None:
    recipe = find_recipe("mwn")
    overrides = ["runner.max_ticks=4", "runner.progress_bar=false", "logger.wandb=false", "evaluate.splits.val=2"]
    overrides.append("debug.limit_warmup_steps=0")
    result = mlotool.run(compose("mwn", overrides), output_dir=tmp_path)
    assert set(result.metrics) >= {"classifier/loss", "reweight/loss", "val/accuracy", "test/accuracy"}
    assert (tmp_path / "overrides.txt").read_text().split() == overrides
    assert (tmp_path / "recipe.yaml").read_text() == recipe.read_text()
    provenance = json.loads((tmp_path / "provenance.json").read_text())
    assert provenance["recipe_path"] == str(recipe)
    assert provenance["command"].startswith("mlotool.run(mlotool.compose('mwn', ['runner.max_ticks=4', ")
    assert evaluate(tmp_path, "test")["test/accuracy"] == result.metrics["test/accuracy"]
    assert isinstance(load(tmp_path, "classifier"), torch.nn.Module)
    assert result.objective == pytest.approx(evaluate(tmp_path, "val")["val/accuracy"])


def test_the_origin_of_a_config(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(find_recipe("plain").read_text())
    config = compose(str(file), ["seed=1"])
    config.seed = 2
    origin, by_override = origin_of(config), origin_of(compose(None, ["+recipe=mwn"]))
    assert origin is not None and by_override is not None
    assert (origin.recipe_path, origin.overrides) == (file, ("seed=1",))
    assert by_override.recipe_path == find_recipe("mwn")
    assert origin_of(copy(config)) is None


COMPOSED = "expected a config that mlotool.compose has returned"
RESULT = RunResult({}, Path("outputs/mwn/then"), None, None)


@pytest.mark.parametrize(
    ("call", "positional", "keywords", "said"),
    [
        (run, ("mwn",), {}, f"run.config: found 'mwn'; {COMPOSED}. Write mlotool.run(mlotool.compose('mwn', "),
        (run, (make_config(),), {"output_dir": 3}, "run.output_dir: found 3; expected a path or null"),
        (load, (RESULT, "c"), {}, "load.run_dir: found a RunResult; expected a path. Give its folder"),
        (load, ("run", ["c"]), {}, "load.problem: found ['c']; expected one problem's name"),
        (evaluate, ("run", ["test"]), {}, "evaluate.split: found ['test']; expected one split's name"),
        (compose, ("mwn",), {"trust": [1]}, "compose.trust: found [1]; expected a list of texts"),
    ],
)
def test_arguments_of_a_wrong_kind_are_refused_by_name(call: Any, positional: Any, keywords: Any, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        call(*positional, **keywords)
    assert str(refused.value).startswith(said)
