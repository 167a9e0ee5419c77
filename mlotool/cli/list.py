"""`mlotool list`: the recipes there are."""

from collections.abc import Sequence
from shutil import get_terminal_size
from typing import TYPE_CHECKING

from mlotool.cli.arguments import VerbParser
from mlotool.core.messages import escape

if TYPE_CHECKING:
    from mlotool.config import RecipeInfo

DESCRIPTION = """The built-in recipes and those in ./recipes, a line each, by task: what the line `# Task:` of their
headers says. `mwn_text (_paper)` stands for mwn_text and mwn_text_paper, which has the paper's own data and sizes.

  mlotool list --names                          every name, one a line
"""
MIN_WIDTH, MAX_ROWS = 40, 500
YOURS = "yours"
_PAPER = "_paper"


def main(words: Sequence[str]) -> int:
    """Print a line for every recipe."""
    parser = VerbParser("list", DESCRIPTION)
    parser.add_argument("--names", action="store_true", help="the bare names, one a line, all variants")
    arguments = parser.parse(words)
    from mlotool import config

    recipes = config.list_recipes()
    if not recipes:
        print("no recipes: neither built in nor in ./recipes")
        return 0
    for line in [_plain(each.name) for each in recipes] if arguments.names else _table(recipes):
        print(line)
    return 0


def _table(recipes: "Sequence[RecipeInfo]") -> list[str]:
    """Return the recipes below the names of their tasks, in lines that fit the terminal."""
    from mlotool.config.recipes import TASKS

    width = max(get_terminal_size((80, 24)).columns, MIN_WIDTH)
    names = {each.name for each in recipes}
    groups: dict[str, list[tuple[str, str]]] = {task: [] for task in TASKS}
    for each in recipes[:MAX_ROWS]:
        # The paper's variant of a recipe that is there stands beside it.
        if each.name.removesuffix(_PAPER) not in names - {each.name}:
            groups.setdefault(_plain(each.task) or YOURS, []).append(_row(each, names))
    column = min(max(len(name) for rows in groups.values() for name, _ in rows), width // 2)
    groups[YOURS] = groups.pop(YOURS, [])
    lines: list[str] = []
    for task, rows in groups.items():
        if rows:
            lines += [*([""] if lines else []), _cut(task, width)]
            lines += [_cut(f"  {name:<{column}}  {summary}".rstrip(), width) for name, summary in rows]
    return [*lines, *([f"... and {len(recipes) - MAX_ROWS} more"] if len(recipes) > MAX_ROWS else [])]


def _row(recipe: "RecipeInfo", names: set[str]) -> tuple[str, str]:
    name, summary = _plain(recipe.name), _plain(recipe.summary)
    if recipe.name + _PAPER in names:
        name += f" ({_PAPER})"
    return name, summary if recipe.source == "built-in" else f"[{recipe.source}] {summary}"


def _plain(text: str) -> str:
    # A name and a summary are anybody's text, a line break in one of them too.
    return " ".join(escape(text).split("\n"))


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else f"{line[: width - 3]}..."
