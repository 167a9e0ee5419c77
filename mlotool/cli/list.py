"""`mlotool list`: the recipes there are."""

from collections.abc import Sequence

from mlotool.cli.arguments import VerbParser
from mlotool.core.printable import printable


def main(words: Sequence[str]) -> int:
    """Print name, source and summary of every recipe, one a line."""
    VerbParser("list", "The built-in recipes and those in ./recipes, with a line each.").parse(words)
    from mlotool import config

    recipes = config.list_recipes()
    if not recipes:
        print("no recipes: neither built in nor in ./recipes")
        return 0
    # A name and a summary are anybody's text, a line break in one of them too.
    rows = [
        [" ".join(printable(text).split("\n")) for text in (each.name, each.source, each.summary)] for each in recipes
    ]
    name_width = max(len(name) for name, _, _ in rows)
    source_width = max(len(source) for _, source, _ in rows)
    for name, source, summary in rows:
        print(f"{name:<{name_width}}  {source:<{source_width}}  {summary}".rstrip())
    return 0
