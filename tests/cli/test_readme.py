"""What the README shows works: its recipe, and every command line that names one."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import mlotool
from mlotool.cli.main import VERBS
from tests.cli.conftest import Result

Call = Callable[..., Result]
README = (Path(__file__).parents[2] / "README.md").read_text()
COMMANDS = [line.split("#")[0].strip() for line in README.splitlines() if line.startswith("    mlotool run +recipe=")]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    [text] = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    (tmp_path / "mine.yaml").write_text(text)
    return tmp_path / "mine.yaml"


def test_its_recipe_is_valid_and_runs(call: Call, recipe: Path, tmp_path: Path) -> None:
    assert call("validate", recipe.name)[0] == 0
    code, _, err = call("run", recipe.name, "debug=fast", "logger=csv", "runner.progress_bar=false")
    assert code == 0, err
    [folder] = (tmp_path / "outputs" / "mine").iterdir()
    assert (folder / "report.html").is_file()


def test_its_recipe_is_the_measured_one(recipe: Path) -> None:
    """All that trains is as in mwn, whose result the README gives."""
    shown, measured = (OmegaConf.to_container(mlotool.compose(name), resolve=True) for name in (str(recipe), "mwn"))
    assert isinstance(shown, dict)
    assert isinstance(measured, dict)
    for part in ("problems", "graph", "evaluate", "runner", "data", "hypergradient", "objective"):
        assert shown[part] == measured[part], part


@pytest.mark.parametrize("command", COMMANDS)
def test_its_commands_compose(call: Call, command: str) -> None:
    assert call("validate", *shlex.split(command)[2:])[0] == 0


def test_it_has_every_verb() -> None:
    assert all(f"`mlotool {verb}" in README for verb in VERBS)
    assert COMMANDS
