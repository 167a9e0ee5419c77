"""`mlotool list`: fits a terminal, groups by task, folds the papers' variants; its names are complete."""

from pathlib import Path

import pytest

from mlotool.config import list_recipes
from mlotool.config.recipes import TASKS
from tests.cli.conftest import Call


@pytest.mark.parametrize("width", [10, 80])
def test_fits_and_folds(call: Call, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    code, out, _ = call("list")
    lines = out.splitlines()
    assert code == 0 and all(len(line) <= max(width, 40) for line in lines)
    assert max(len(line) for line in lines) == max(width, 40)
    assert any(line.startswith("  mwn_text (_paper)") for line in lines)
    assert not any(line.startswith("  mwn_text_paper") for line in lines)


def test_groups_by_task(call: Call) -> None:
    groups = _groups(call("list")[1])
    assert call("list", "--names")[1].split() == [recipe.name for recipe in list_recipes()]
    assert tuple(groups) == TASKS
    assert {"mwn", "data_cleaning", "label_correction"} < set(groups["data reweighting and cleaning"])
    assert groups["hyperparameters"] == ["learned_lr", "lm_learning_rate", "logistic_hpo"]
    assert groups["baselines"] == ["lm_plain", "lm_plain_start", "plain"]
    assert "mwn_layerparallel" in groups["layer-parallel training"]


def test_recipes_of_ones_own_are_yours_unless_they_say_more(call: Call, tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    for name, header in {
        "mine": "# A first try.",
        "other": "# A second try.\n# Task: meta-learning",
        "new": "# Task: \x1b[31msorting\n# A third one.",
        "task_only": "# Task: baselines",
    }.items():
        (tmp_path / "recipes" / f"{name}.yaml").write_text(f"# @package _global_\n{header}\ndefaults: [plain]\n")
    out = call("list")[1]
    groups = _groups(out)
    assert list(groups)[-1] == "yours" and groups["yours"] == ["mine"]
    assert "other" in groups["meta-learning"] and groups["\\x1b[31msorting"] == ["new"]
    assert groups["baselines"] == ["lm_plain", "lm_plain_start", "plain", "task_only"]
    assert "[./recipes] A third one." in out


def _groups(text: str) -> dict[str, list[str]]:
    """Return the names of the recipes below each heading."""
    blocks = [block.splitlines() for block in text.split("\n\n")]
    return {heading: [line.split()[0] for line in lines] for heading, *lines in blocks}
