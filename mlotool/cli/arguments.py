"""What verbs accept alike: a parser, a recipe with overrides, and Hydra in our process, which composes them."""

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import wrap
from typing import Any, NamedTuple, NoReturn

from mlotool import config
from mlotool.cli.terminal import say
from mlotool.config.recipes import recipe_argument
from mlotool.config.security.trusted import recall_trust
from mlotool.core.errors import ConfigError
from mlotool.core.messages import did_you_mean
from mlotool.folders import hub

Task = Callable[[Any], float | None]


class VerbParser(argparse.ArgumentParser):
    """A parser of one verb, whose errors are ConfigErrors.

    Args:
        verb: its name.
        description: for --help, kept as it is laid out: the docstring of the verb's file.
    """

    def __init__(self, verb: str, description: str | None) -> None:
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


def recipe_parser(verb: str, description: str | None) -> VerbParser:
    """Return the parser of a verb that takes a recipe and overrides, with `recipe`, `overrides` and `trust`."""
    parser = VerbParser(verb, description)
    parser.add_argument(
        "words", nargs="*", metavar="RECIPE [key=value]",
        help="a recipe's name, +recipe=NAME or a path to its file, and overrides",
    )  # fmt: skip
    add_trust(parser)
    return parser


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Add --trust, and --allow-hub, which holds from then on."""
    parser.add_argument(
        "--trust", action="append", default=[], metavar="PACKAGE",
        help="let recipes use a Python package of yours; may be given more than once",
    )  # fmt: skip
    parser.add_argument(
        "--allow-hub", action=_AllowHub, nargs=0, default=False,
        help="let models and tokenizers be named as on the Hugging Face Hub, and fetch them from there",
    )  # fmt: skip


class _AllowHub(argparse.Action):
    def __call__(self, parser: Any, namespace: argparse.Namespace, *_: Any) -> None:
        setattr(namespace, self.dest, True)
        hub.allow_hub()


def take_trust(packages: Sequence[str]) -> None:
    """Trust the packages of --trust, and where a recipe names them those that `mlotool trust` has remembered.

    Raises:
        ConfigError: there is no such package, or it is not the user's to trust.
    """
    for package in packages:
        config.trust(package)
    recall_trust(say)


def trust_words(packages: Iterable[str]) -> list[str]:
    """Return packages as words of a command line."""
    return [word for package in packages for word in ("--trust", package)]


_RECIPE_KEY = re.compile(r"^\+{0,2}recipe=(?P<value>.*)$", re.DOTALL)


class Request(NamedTuple):
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
    [argument], [folder] = recipe_argument(word)
    return argument.partition("=")[2], folder / Path(word).name


def compose_request(words: Sequence[str], verb: str, trusted: Sequence[str] = ()) -> tuple[Request, Any]:
    """Return the request that `words` make, and its composed config.

    Raises:
        ConfigError: no recipe, several, or one that does not compose.
    """
    request = read_request(words)
    require_recipe(request, verb)
    take_trust(trusted)
    recipe = request.recipe if request.file is None else str(request.file)
    return request, config.compose(recipe, request.overrides)


def require_recipe(request: Request, verb: str) -> None:
    """Raise a ConfigError that lists the recipes where a request names none."""
    if request.recipe is not None:
        return
    recipes = config.list_recipes()
    groups: dict[str, list[str]] = {}
    for info in sorted(recipes, key=lambda info: not info.task):
        groups.setdefault(info.task or "without a task", []).append(info.name)
    listed = (wrap(f"{task}: {', '.join(names)}", 100, subsequent_indent="  ") for task, names in groups.items())
    raise ConfigError(
        f"`mlotool {verb}` needs a recipe, but none was given; expected a name of these, or a path to a file. Write: "
        f"mlotool {verb} {recipes[0].name if recipes else 'path/to/recipe.yaml'}\n"
        + "\n".join(line for lines in listed for line in lines)
    )


def open_sources(request: Request, trusted: Sequence[str] = ()) -> None:
    """Make a request's recipes known to Hydra, after refusing what no recipe may contain.

    Raises:
        ConfigError: no such recipe, or a recipe that is refused.
    """
    take_trust(trusted)
    config.register_sources([] if request.file is None else [request.file.parent])
    # The source refuses the same when Hydra loads a recipe; here it happens before Hydra has started at all.
    for name in request.recipe_names():
        config.check_recipe_file(request.file or config.find_recipe(name))


def call_hydra(words: Sequence[str], task: Task, flags: Sequence[str] = ()) -> None:
    """Call `task` the way `@hydra.main` does, for every job that `words` describe.

    Args:
        words: overrides.
        task: gets the config of a job, without the hydra node.
        flags: what else there is on Hydra's command line.

    Raises:
        ConfigError: what Hydra or OmegaConf refuse.
    """
    import hydra

    from mlotool.config.composition import hydra_words

    # Completion scripts are made for the program in argv[0].
    with config.config_errors(words=words), _argv(["mlotool", *hydra_words(words), *flags]):
        folder = str(config.package_dir("conf"))
        hydra.main(config_path=folder, config_name="config", **config.VERSION_KEYWORDS)(task)()


def never(config: Any) -> float | None:
    """Stand in for the task where Hydra runs no job."""
    raise AssertionError(f"only shown, not run: {config}")


@contextmanager
def _argv(argv: list[str]) -> Iterator[None]:
    # Hydra reads sys.argv, and without the variable it prints errors and exits by itself.
    kept, sys.argv = sys.argv, argv
    variable = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        sys.argv = kept
        if variable is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = variable
