"""Arguments of a wrong kind to run, load, evaluate and compose are refused, each by its name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import mlotool
from mlotool import RunResult, compose, load, run
from mlotool.core.errors import ConfigError
from mlotool.runner import evaluate
from tests.runner.tiny import make_config

RESULT = RunResult({}, Path("outputs/mwn/then"), None, None)
CONFIG = make_config()
COMPOSED = "expected a config that mlotool.compose has returned"
CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], str]] = {
    "name": (run, ("mwn",), {}, f"run.config: found 'mwn'; {COMPOSED}. Write mlotool.run(mlotool.compose('mwn'))."),
    "path": (
        run,
        (Path("x.yaml"),),
        {},
        f"run.config: found 'x.yaml'; {COMPOSED}. Write mlotool.run(mlotool.compose('x",
    ),
    "none": (run, (None,), {}, f"run.config: found None; {COMPOSED}"),
    "dict": (run, ({"name": "a"},), {}, f"run.config: found {{name: 'a'}}; {COMPOSED}. Write what differs from"),
    "part": (run, (OmegaConf.create({"name": "a"}),), {}, f"run.config: found {{name: 'a'}}; {COMPOSED}"),
    "result": (run, (RESULT,), {}, f"run.config: found a RunResult; {COMPOSED}"),
    "folder": (run, (CONFIG,), {"output_dir": 3}, "run.output_dir: found 3; expected a path or null"),
    "here": (run, (CONFIG,), {"output_dir": ""}, "run.output_dir: found ''; expected a path or null"),
    "yes": (run, (CONFIG,), {"resume": True}, "run.resume: found True; expected 'auto', a run folder, a checkpoint"),
    "tick": (run, (CONFIG,), {"resume": 3}, "run.resume: found 3; expected 'auto', a run folder"),
    "resumed": (run, (CONFIG,), {"resume": RESULT}, "run.resume: found a RunResult; expected 'auto', a run folder"),
    "watch": (run, (CONFIG,), {"watch": 3}, "run.watch: found 3; expected a function, or null"),
    "created": (run, (CONFIG,), {"when_created": 3}, "run.when_created: found 3; expected a function, or null"),
    "origin": (run, (CONFIG,), {"origin": "me"}, "run.origin: found 'me'; expected an Origin, or null"),
    "load result": (
        load,
        (RESULT, "classifier"),
        {},
        "load.run_dir: found a RunResult; expected a path. Give its folder: result.output_dir.",
    ),
    "load none": (load, (None, "classifier"), {}, "load.run_dir: found None; expected a path"),
    "load list": (load, ("run", ["classifier"]), {}, "load.problem: found ['classifier']; expected one problem's name"),
    "checkpoint": (load, ("run", "c", None), {}, "load.checkpoint: found None; expected 'best' or 'last'"),
    "override": (
        load,
        ("run", "c"),
        {"overrides": "a=1"},
        "load.overrides: found 'a=1'; expected a list of texts. Write",
    ),
    "overrides": (load, ("run", "c"), {"overrides": [3]}, "load.overrides: found [3]; expected a list of texts"),
    "trust": (load, ("run", "c"), {"trust": True}, "load.trust: found True; expected a list of texts"),
    "evaluate": (evaluate, (RESULT, "test"), {}, "evaluate.run_dir: found a RunResult; expected a path"),
    "split": (evaluate, ("run", ["test"]), {}, "evaluate.split: found ['test']; expected one split's name"),
    "recipe": (compose, (3,), {}, "compose.recipe: found 3; expected a name, such as 'mwn', or the path of a file"),
    "text": (
        compose,
        ("mwn", "seed=1"),
        {},
        "compose.overrides: found 'seed=1'; expected a list of texts. Write overr",
    ),
    "number": (compose, ("mwn", [3]), {}, "compose.overrides: found [3]; expected a list of texts"),
    "keys": (compose, ("mwn", {"seed": 1}), {}, "compose.overrides: found {seed: 1}; expected a list of texts"),
    "trusted": (compose, ("mwn",), {"trust": True}, "compose.trust: found True; expected a list of texts"),
    "trusted number": (compose, ("mwn",), {"trust": [1]}, "compose.trust: found [1]; expected a list of texts"),
    "trusted module": (compose, ("mwn",), {"trust": [mlotool]}, "compose.trust: found [a module]; expected a list"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_refuses(name: str) -> None:
    call, given, keywords, said = CALLS[name]
    with pytest.raises(ConfigError) as refused:
        call(*given, **keywords)
    assert str(refused.value).startswith(said)
