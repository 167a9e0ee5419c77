"""Every recipe runs, and its header says how."""

from itertools import takewhile
from pathlib import Path

import pytest

import mlotool
from benchmarks.recipe_table import BEGIN, END, table
from mlotool.config.recipes import TASKS
from tests.small_recipes import RECIPES, small

# Both have the radius of the DARTS paper, meant for its images; of a few that are noise, eight pixels wide, the cells'
# batch statistics bend at every radius.
BENDS = pytest.mark.filterwarnings("ignore:problems.classifier.hypergradient. found products by finite differences")


# At its start a network may have negative curvature, which a solver says once.
@pytest.mark.filterwarnings("ignore:The ConjugateGradient solve at problem 'learner'")
# A few ticks do not draw each candidate.
@pytest.mark.filterwarnings("ignore:problems.classifier.module. found candidates that no training step has computed")
# A few small images are no measure of a network's balance, nor of its penalties.
@pytest.mark.filterwarnings("ignore:.* times their mean:UserWarning")
@pytest.mark.filterwarnings("ignore:.*at interface 1 the violation is:UserWarning")
# Another version of Python has other text.
@pytest.mark.filterwarnings("ignore:data.sha256")
# `make recipes` takes all of them.
@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=BENDS) if name in ("darts", "darts_paper") else name for name in RECIPES]
)
def test_every_recipe_runs(recipe: str, tmp_path: Path, image_folder: Path) -> None:
    config = small(recipe, image_folder)
    result = mlotool.run(config, output_dir=tmp_path / "run")
    steps = {key: value for key, value in result.metrics.items() if key.endswith("/step")}
    assert min(steps.values(), default=0) >= min(config.runner.max_ticks, 1), "a problem never stepped"
    assert config.evaluate is None or any(key.startswith("test/") for key in result.metrics)
    assert result.checkpoint is not None


FILES = sorted((Path(__file__).parents[1] / "recipes").glob("*.yaml"))


def test_headers() -> None:
    assert FILES
    for file in FILES:
        lines = file.read_text(encoding="utf-8").splitlines()
        header = list(takewhile(lambda line: line.startswith("#"), lines))
        assert header[0] == "# @package _global_", file
        for field in ("Task:", "Command:", "Result:", "Time:"):
            assert sum(line.startswith(f"# {field}") for line in header) == 1, (file, field)
        assert next(line.removeprefix("# Task:").strip() for line in header if line.startswith("# Task:")) in TASKS
        assert f"# Command:   mlotool run {file.stem}" in "\n".join(header)
        assert "to be measured" not in "\n".join(header).lower()


def test_the_page_of_recipes_has_their_table() -> None:
    root = Path(__file__).parents[1]
    text = (root / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert f"{BEGIN}\n{table()}\n{END}" in text, "run: python -m benchmarks.recipe_table"
