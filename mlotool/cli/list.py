"""`mlotool list`: the recipes there are."""

from collections.abc import Sequence

from mlotool.cli.arguments import VerbParser


def main(words: Sequence[str]) -> int:
    """Print name, source and summary of every recipe, one a line."""
    VerbParser("list", "The built-in recipes and those in ./recipes, with a line each.").parse(words)
    from mlotool import config

    recipes = config.list_recipes()
    if not recipes:
        print("no recipes: neither built in nor in ./recipes")
        return 0
    name_width = max(len(recipe.name) for recipe in recipes)
    source_width = max(len(recipe.source) for recipe in recipes)
    for recipe in recipes:
        print(f"{recipe.name:<{name_width}}  {recipe.source:<{source_width}}  {recipe.summary}".rstrip())
    return 0
