"""Arguments of a wrong kind to run, load, evaluate and compose are refused, each by its name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlotool import RunResult, compose, load, run
from mlotool.core.errors import ConfigError
from mlotool.runner import evaluate
from tests.runner.tiny import make_config

RESULT = RunResult({}, Path("outputs/mwn/then"), None, None)
CONFIG = make_config()
COMPOSED = "expected a config that mlotool.compose has returned"
CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], str]] = {
    "name": (run, ("mwn",), {}, f"run.config: found 'mwn'; {COMPOSED}. Write mlotool.run(mlotool.compose('mwn'"),
    "dict": (run, ({"name": "a"},), {}, f"run.config: found {{name: 'a'}}; {COMPOSED}. Write mlotool.run("),
    "folder": (run, (CONFIG,), {"output_dir": 3}, "run.output_dir: found 3; expected a path or null"),
    "resume": (run, (CONFIG,), {"resume": True}, "run.resume: found True; expected 'auto', a run folder, a checkpoint"),
    "load result": (
        load,
        (RESULT, "classifier"),
        {},
        "load.run_dir: found a RunResult; expected a path. Give its folder: result.output_dir.",
    ),
    "load list": (load, ("run", ["classifier"]), {}, "load.problem: found ['classifier']; expected one problem's name"),
    "overrides": (load, ("run", "c"), {"overrides": "a=1"}, "load.overrides: found 'a=1'; expected a list of texts"),
    "split": (evaluate, ("run", ["test"]), {}, "evaluate.split: found ['test']; expected one split's name"),
    "recipe": (compose, (3,), {}, "compose.recipe: found 3; expected a name, such as 'mwn', or the path of a file"),
    "trusted": (compose, ("mwn",), {"trust": [1]}, "compose.trust: found [1]; expected a list of texts"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_refuses(name: str) -> None:
    call, given, keywords, said = CALLS[name]
    with pytest.raises(ConfigError) as refused:
        call(*given, **keywords)
    assert str(refused.value).startswith(said)
