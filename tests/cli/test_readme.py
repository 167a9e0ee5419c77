"""What the README says of the recipes, verbs and files is so; its blocks of code run in tests/docs/test_pages.py."""

import re
from pathlib import Path

from omegaconf import OmegaConf

import mlotool
from mlotool.cli.main import VERBS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_its_recipe_is_the_measured_one(tmp_path: Path) -> None:
    """All that trains is as in mwn, whose result the README gives."""
    [text] = re.findall(r"```yaml title=\"mine.yaml\"\n(.*?)```", README, re.DOTALL)
    (tmp_path / "mine.yaml").write_text(text)
    shown, measured = (
        OmegaConf.to_container(mlotool.compose(name), resolve=True) for name in (str(tmp_path / "mine.yaml"), "mwn")
    )
    assert isinstance(shown, dict) and isinstance(measured, dict)
    for part in ("problems", "graph", "evaluate", "runner", "data", "hypergradient", "objective"):
        assert shown[part] == measured[part], part


def test_it_has_every_verb() -> None:
    assert all(f"`mlotool {verb}" in README for verb in VERBS)


def test_it_is_three_screens() -> None:
    assert len(README.splitlines()) <= 150
