"""An argument parser whose errors are ConfigErrors, and what several verbs accept alike."""

import argparse
from collections.abc import Sequence
from typing import NoReturn

from mlotool.config.schema import ROOT_KEYS
from mlotool.config.schema_faults import place_of
from mlotool.core.errors import ConfigError
from mlotool.core.suggest import did_you_mean


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
            key, _, value = unknown[0].lstrip("-").partition("=")
            setting = place_of(key) if key not in ROOT_KEYS else key
            if unknown[0].startswith("-") and setting and any(action.dest == "words" for action in self._actions):
                written = setting if "=" in setting else f"{setting}={value or '..'}"
                self.error(f"unknown argument '{unknown[0]}'; settings have no dashes: write {written}")
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
