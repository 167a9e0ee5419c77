"""What the README shows works: its recipe, and every command line that names one."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from mlotool.cli.main import VERBS
from tests.cli.conftest import Result

Call = Callable[..., Result]
README = (Path(__file__).parents[2] / "README.md").read_text()
COMMANDS = [line.split("#")[0].strip() for line in README.splitlines() if line.startswith("    mlotool run +recipe=")]


def test_its_recipe_is_valid(call: Call, tmp_path: Path) -> None:
    [recipe] = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    (tmp_path / "mine.yaml").write_text(recipe)
    assert call("validate", "mine.yaml")[0] == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_its_commands_compose(call: Call, command: str) -> None:
    assert call("validate", *shlex.split(command)[2:])[0] == 0


def test_it_has_every_verb() -> None:
    assert all(f"`mlotool {verb}" in README for verb in VERBS)
    assert COMMANDS
