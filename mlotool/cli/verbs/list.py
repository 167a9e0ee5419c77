"""List the built-in recipes and those in ./recipes, one line each, by task.

The task is that of the line `# Task:` in a recipe's header. `mwn_text (_paper)` stands for mwn_text and
mwn_text_paper, which has the paper's own data and sizes.

  mlotool list --names                          all names, one per line
"""

from shutil import get_terminal_size

from mlotool import config
from mlotool.cli.arguments import VerbParser
from mlotool.cli.terminal import UNWATCHED_WIDTH, one_line
from mlotool.config.recipes import TASKS, RecipeInfo

MIN_WIDTH, MAX_ROWS = 40, 500
YOURS = "yours"
_PAPER = "_paper"


def main(words: list[str]) -> int:
    """Print a line for every recipe."""
    parser = VerbParser("list", __doc__)
    parser.add_argument("--names", action="store_true", help="the bare names, one a line, all variants")
    arguments = parser.parse(words)
    recipes = config.list_recipes()
    if not recipes:
        print("no recipes: neither built in nor in ./recipes")
        return 0
    print("\n".join([one_line(recipe.name) for recipe in recipes] if arguments.names else _table(recipes)))
    return 0


def _table(recipes: list[RecipeInfo]) -> list[str]:
    """Return the recipes below the names of their tasks, in lines that fit the terminal."""
    # Nothing is cut where nobody watches, as in `print_table`.
    width = max(get_terminal_size((UNWATCHED_WIDTH, 24)).columns, MIN_WIDTH)
    names = {recipe.name for recipe in recipes}
    groups: dict[str, list[tuple[str, str]]] = {task: [] for task in TASKS}
    for recipe in recipes[:MAX_ROWS]:
        # The paper's variant of a recipe that is there stands beside it.
        if recipe.name.removesuffix(_PAPER) not in names - {recipe.name}:
            paper = f" ({_PAPER})" if recipe.name + _PAPER in names else ""
            origin = "" if recipe.source == "built-in" else f"[{recipe.source}] "
            row = one_line(recipe.name) + paper, origin + one_line(recipe.summary)
            groups.setdefault(one_line(recipe.task) or YOURS, []).append(row)
    column = min(max(len(name) for rows in groups.values() for name, _ in rows), width // 2)
    groups[YOURS] = groups.pop(YOURS, [])
    lines: list[str] = []
    for task, rows in groups.items():
        if rows:
            lines += [*([""] if lines else []), task, *(f"  {name:<{column}}  {text}".rstrip() for name, text in rows)]
    more = [f"... and {len(recipes) - MAX_ROWS} more"] if len(recipes) > MAX_ROWS else []
    return [line if len(line) <= width else f"{line[: width - 1]}…" for line in (*lines, *more)]
