"""`mlotool -sc query=bash`: what could stand where the cursor is; `-sc install=bash`: the script that asks.

Keys, options and values are Hydra's own completions, filtered: Hydra would hand a shell whatever a recipe says.
"""

import os
import re
from contextlib import redirect_stderr, redirect_stdout, suppress
from io import StringIO
from itertools import pairwise

from mlotool import config
from mlotool.cli.arguments import Request, call_hydra, never, open_sources, read_request
from mlotool.cli.main import ALIASES, VERBS
from mlotool.config import recipes, schema
from mlotool.core.errors import ConfigError

WITH_RECIPE = ("run", "show", "validate", "check", "copy")
OPTIONS_WITH_VALUE = ("--trust", "-cd", "--config-dir")
SHELLS = ("bash", "zsh", "fish")
# A shell expands what it is offered: `$(..)` in a recipe would be run. This leaves out ${..} and ??? as well.
_HARMLESS = re.compile(r"[\w.,:@+~/=%\-]+")


def main(words: list[str]) -> int:
    """Answer a shell."""
    command, _, shell = (words[0] if words else "").partition("=")
    if len(words) != 1 or command not in ("install", "uninstall", "query") or shell not in SHELLS:
        raise ConfigError(f"Found '-sc {' '.join(words)}'; expected install=SHELL with one of {', '.join(SHELLS)}.")
    if command == "query":
        offers = sorted(filter(_HARMLESS.fullmatch, set(_offers(os.environ.get("COMP_LINE", "")))))
        print(("\n" if shell == "fish" else " ").join(offers))
    else:
        # To bash an @ begins a new word, unless it is told otherwise, as Hydra does for the =.
        print(_of_hydra(words[0]).replace("${COMP_WORDBREAKS//=}", "${COMP_WORDBREAKS//[=@]}"), end="")
    return 0


def _of_hydra(request: str) -> str:
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()):
        call_hydra([], never, ["-sc", request])
    return out.getvalue()


def _offers(line: str) -> list[str]:
    _, *words = line.split()
    current = "" if not words or line[-1].isspace() else words.pop()
    if not words:
        return [verb for verb in VERBS if verb.startswith(current)]
    words[0] = ALIASES.get(words[0], words[0])
    pairs = pairwise(words)
    before = [word for last, word in pairs if last not in OPTIONS_WITH_VALUE and not word.startswith("-")]
    if words[0] not in WITH_RECIPE or current.startswith("-"):
        return []
    # A line that would fail has no completions; its error comes when it is run.
    with suppress(ConfigError, RecursionError):
        request = read_request(before)
        names = _recipe_names(current) if request.recipe is None and "=" not in current else []
        # A recipe comes first; the keys that there are without one are bare.
        return names if names or words[0] == "copy" else _override_offers(request, current)
    return []


def _recipe_names(prefix: str) -> list[str]:
    return [info.name for info in config.list_recipes() if info.name.startswith(prefix)]


def _override_offers(request: Request, current: str) -> list[str]:
    address, equals, value = current.partition("=")
    # An option can go to a place of its own, which Hydra does not know: model@problems.classifier.module=resnet8
    group = address.lstrip("+~").partition("@")[0]
    if equals and group in schema.GROUPS:
        options = _recipe_names(value) if group == recipes.GROUP else recipes.option_names(group)
        return [f"{address}={option}" for option in options if option.startswith(value)]
    from mlotool.config.composition import is_sweep

    # Of a sweep's values the first recipe says what keys there are.
    first = [f"+recipe={name}" for name in request.recipe_names()[:1]]
    open_sources(request)
    others = (word for word in request.overrides if not is_sweep(word))
    os.environ["COMP_LINE"] = " ".join(["mlotool", *first, *others, current])
    return _of_hydra("query=bash").split()
