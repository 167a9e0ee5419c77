"""Every recipe's header says how to run it, what comes out, and how long that takes."""

from itertools import takewhile
from pathlib import Path

from benchmarks.recipe_table import BEGIN, END, table
from mlotool.config.recipes import TASKS

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*.yaml"))


def test_headers() -> None:
    assert RECIPES
    for file in RECIPES:
        lines = file.read_text(encoding="utf-8").splitlines()
        header = list(takewhile(lambda line: line.startswith("#"), lines))
        assert header[0] == "# @package _global_", file
        for field in ("Task:", "Command:", "Result:", "Time:"):
            assert sum(line.startswith(f"# {field}") for line in header) == 1, (file, field)
        assert next(line.removeprefix("# Task:").strip() for line in header if line.startswith("# Task:")) in TASKS
        assert f"# Command:   mlotool run +recipe={file.stem}" in "\n".join(header)
        assert "to be measured" not in "\n".join(header).lower()


def test_the_page_of_recipes_has_their_table() -> None:
    root = Path(__file__).parents[1]
    text = (root / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert f"{BEGIN}\n{table()}\n{END}" in text, "run: python -m benchmarks.recipe_table"
