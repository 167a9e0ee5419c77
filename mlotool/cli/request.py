"""What a command line asks for: which recipe, from where, with which overrides."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlotool.core.errors import ConfigError
from mlotool.core.suggest import did_you_mean

_RECIPE_KEY = re.compile(r"^\+{0,2}recipe(?P<package>@[^=]*)?=(?P<value>.*)$", re.DOTALL)
_PLAIN_NAME = re.compile(r"^[\w/.-]+$")
SUFFIXES = (".yaml", ".yml")


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
        if match and not match["package"]:
            recipes.append((match["value"], None))
        elif "=" in word or word.startswith("~"):
            overrides.append(word)
        elif is_path(word):
            file = existing_recipe_file(word)
            recipes.append((_quoted(file.stem), file))
        else:
            recipes.append((word, None))
    if len(recipes) > 1:
        found = " and ".join(f"'{name}'" for name, _ in recipes)
        raise ConfigError(f"Found two recipes, {found}; expected one. Write an override as key=value.")
    recipe, file_ = recipes[0] if recipes else (None, None)
    return Request(recipe or None, file_, tuple(overrides))


def is_path(word: str) -> bool:
    """Say whether a word means a file, not a recipe's name."""
    return word.endswith(SUFFIXES) or "/" in word or "\\" in word


def existing_recipe_file(word: str) -> Path:
    """Return the absolute path of a recipe file; a ConfigError names the nearest file where there is none."""
    file = Path(word).expanduser()
    if file.suffix != ".yaml":
        raise ConfigError(f"Found the recipe file '{word}'; expected a name that ends in .yaml. Rename the file.")
    if not file.is_file():
        siblings = [str(each) for each in file.parent.glob("*.yaml")] if file.parent.is_dir() else []
        raise ConfigError(
            f"There is no recipe file '{word}' (working directory {Path.cwd()}).{did_you_mean(str(file), siblings)} "
            "Give a path to a .yaml file, or a name out of `mlotool list`."
        )
    return file.resolve()


def _quoted(name: str) -> str:
    # Hydra's grammar reads spaces, commas and brackets in a value.
    return name if _PLAIN_NAME.match(name) else "'" + name.replace("'", r"\'") + "'"
