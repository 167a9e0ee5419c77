"""Recipes by name: what to say where none was given, and the composed config of one."""

from collections.abc import Sequence
from typing import Any

from mlotool import config
from mlotool.cli.request import Request, read_request
from mlotool.core.errors import ConfigError


def compose_request(words: Sequence[str], verb: str, trusted: Sequence[str] = ()) -> tuple[Request, Any]:
    """Return the request that `words` make, and its composed config.

    Raises:
        ConfigError: no recipe, several, or one that does not compose.
    """
    request = read_request(words)
    require_recipe(request, verb)
    for package in trusted:
        config.trust(package)
    recipe = request.recipe if request.file is None else str(request.file)
    return request, config.compose(recipe, request.overrides)


def require_recipe(request: Request, verb: str) -> None:
    """Raise a ConfigError that lists the recipes where a request names none."""
    if request.recipe is not None:
        return
    names = [info.name for info in config.list_recipes()]
    resumed = next((word for word in request.overrides if word.startswith("resume=")), None)
    if resumed is not None:
        raise ConfigError(
            f"`mlotool {verb}` needs the recipe as well, but found {resumed} alone; expected the words that began the "
            f"run. Write: mlotool {verb} RECIPE {resumed}, with its other overrides."
        )
    raise ConfigError(
        f"`mlotool {verb}` needs a recipe, but none was given; expected one of {', '.join(names) or '(none found)'}, "
        f"or a path to a file. Write: mlotool {verb} {names[0] if names else 'path/to/recipe.yaml'}"
    )
