"""What a command line asks for: which recipe, from where, with which overrides."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlotool.core.errors import ConfigError

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
        if match is None and " " in word.partition("=")[0].strip() and "=" in word:
            raise ConfigError(
                f"Found '{word}', which has a space before its =; expected a recipe, or key=value. Write each as a "
                f"word of its own, without quotes around several: {' '.join(word.split())}"
            )
        if match is None and ("=" in word or (word.startswith("~") and not _is_path(word))):
            overrides.append(word)
            continue
        recipe = match["value"] if match else word
        recipes.append(_from_path(recipe) if _is_path(recipe) else (recipe, None))
    if len(recipes) > 1:
        found = " and ".join(f"'{name}'" for name, _ in recipes)
        raise ConfigError(f"Found two recipes, {found}; expected one. Write an override as key=value.")
    name, file = recipes[0] if recipes else (None, None)
    return Request(name or None, file, tuple(overrides))


def _is_path(word: str) -> bool:
    """Say whether a word means a file, not a recipe's name."""
    return word.endswith((".yaml", ".yml"))


def _from_path(word: str) -> tuple[str, Path]:
    from mlotool.config.recipes import recipe_argument

    [argument], [folder] = recipe_argument(word)
    return argument.partition("=")[2], folder / Path(word).name
