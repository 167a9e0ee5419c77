"""An argument parser whose errors are ConfigErrors, and what several verbs accept alike."""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from mlotool import config
from mlotool.core.errors import ConfigError
from mlotool.core.messages import did_you_mean


class VerbParser(argparse.ArgumentParser):
    """Parser of one verb.

    Args:
        verb: its name.
        description: for --help; kept as it is laid out.
    """

    def __init__(self, verb: str, description: str) -> None:
        super().__init__(
            prog=f"mlotool {verb}",
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse a verb's arguments; options and overrides may come in any order."""
        namespace, unknown = self.parse_known_intermixed_args(list(words))
        if unknown:
            options = [option for action in self._actions for option in action.option_strings]
            self.error(f"unknown argument '{unknown[0]}'{did_you_mean(unknown[0], options)}")
        return namespace

    def error(self, message: str) -> NoReturn:
        """Raise a ConfigError."""
        usage = " ".join(self.format_usage().split()).removeprefix("usage: ")
        separator = "" if message.endswith("?") else ";"
        raise ConfigError(f"{self.prog}: {message}{separator} expected: {usage}. See {self.prog} --help.")


def recipe_parser(verb: str, description: str) -> VerbParser:
    """Return the parser of a verb that takes a recipe and overrides, with `recipe`, `overrides` and `trust`."""
    parser = VerbParser(verb, description)
    parser.add_argument(
        "words", nargs="*", metavar="RECIPE [key=value]",
        help="a recipe's name, +recipe=NAME or a path to its file, and overrides",
    )  # fmt: skip
    add_trust(parser)
    return parser


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Add --trust."""
    parser.add_argument(
        "--trust", action="append", default=[], metavar="PACKAGE",
        help="let recipes use a Python package of yours; may be given more than once",
    )  # fmt: skip


_RECIPE_KEY = re.compile(r"^\+{0,2}recipe=(?P<value>.*)$", re.DOTALL)


@dataclass(frozen=True)
class Request:
    """A recipe and its overrides.

    Args:
        recipe: the value of `+recipe=`, as it was typed or made from a path; None where no recipe was named.
        file: the recipe's file where a path was given.
        overrides: all other words.
    """

    recipe: str | None
    file: Path | None
    overrides: tuple[str, ...]

    def recipe_names(self) -> list[str]:
        """Return the recipes by name: several in a sweep (`a,b`), none where Hydra has to work them out (`glob(*)`)."""
        if self.file is not None:
            return [self.file.stem]
        text = self.recipe or ""
        return [] if "(" in text else [name for name in re.split(r"[\s,\[\]'\"]+", text) if name]

    def hydra_words(self) -> list[str]:
        """Return the overrides as Hydra wants them."""
        first = [] if self.recipe is None else [f"+recipe={self.recipe}"]
        return [*first, *self.overrides]


def read_request(words: Sequence[str]) -> Request:
    """Accept a recipe as `NAME`, `+recipe=NAME` or `path/to/NAME.yaml`, in any place among the overrides.

    Raises:
        ConfigError: two recipes, no such file, or a word that is neither recipe nor override.
    """
    recipes: list[tuple[str, Path | None]] = []
    overrides: list[str] = []
    for word in words:
        match = _RECIPE_KEY.match(word)
        recipe = match["value"] if match else word
        is_path = recipe.endswith((".yaml", ".yml"))
        if match is None and ("=" in word or (word.startswith("~") and not is_path)):
            overrides.append(word)
        else:
            recipes.append(_from_path(recipe) if is_path else (recipe, None))
    if len(recipes) > 1:
        found = " and ".join(f"'{name}'" for name, _ in recipes)
        raise ConfigError(f"Found two recipes, {found}; expected one. Write an override as key=value.")
    name, file = recipes[0] if recipes else (None, None)
    return Request(name or None, file, tuple(overrides))


def _from_path(word: str) -> tuple[str, Path]:
    from mlotool.config.recipes import recipe_argument

    [argument], [folder] = recipe_argument(word)
    return argument.partition("=")[2], folder / Path(word).name


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
    raise ConfigError(
        f"`mlotool {verb}` needs a recipe, but none was given; expected one of {', '.join(names) or '(none found)'}, "
        f"or a path to a file. Write: mlotool {verb} {names[0] if names else 'path/to/recipe.yaml'}"
    )
