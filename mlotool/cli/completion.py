"""`mlotool -sc query=bash`: what could stand where the cursor is; `-sc install=bash`: the script that asks."""

import os
import re
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from io import StringIO

from mlotool.cli.main import VERBS
from mlotool.cli.request import Request, read_request
from mlotool.core.errors import ConfigError

WITH_OVERRIDES = ("run", "show", "validate")
WITH_RECIPE = (*WITH_OVERRIDES, "copy")
OPTIONS_WITH_VALUE = ("--trust", "-cd", "--config-dir")
SHELLS = ("bash", "zsh", "fish")
# An option of a config group at a place of its own: model@problems.classifier.module=resnet8
_PLACED_OPTION = re.compile(r"(?P<group>\+{0,2}[\w/]+)(?P<place>@[\w.]+)=(?P<option>.*)")


def main(words: Sequence[str]) -> int:
    """Answer a shell."""
    command, _, shell = (words[0] if words else "").partition("=")
    if len(words) != 1 or command not in ("install", "uninstall", "query") or shell not in SHELLS:
        raise ConfigError(
            f"Found '-sc {' '.join(words)}'; expected install=SHELL or uninstall=SHELL with {', '.join(SHELLS)}. "
            'Write: eval "$(mlotool -sc install=bash)"'
        )
    if command != "query":
        with redirect_stdout(StringIO()) as script:
            _ask_hydra(words, Request(None, None, ()), "")
        # To bash an @ begins a new word, unless it is told otherwise, as Hydra does for the =.
        print(script.getvalue().replace("${COMP_WORDBREAKS//=}", "${COMP_WORDBREAKS//[=@]}"), end="")
        return 0
    line = os.environ.get("COMP_LINE", "")
    before, current = _split(line)
    if not before:
        print(" ".join(verb for verb in VERBS if verb.startswith(current)))
    elif before[0] in WITH_RECIPE:
        # A line that would fail has no completions; its error comes when it is run.
        with suppress(ConfigError):
            _complete_recipe(words, before[0], before[1:], current)
    return 0


def _split(line: str) -> tuple[list[str], str]:
    """Return the words behind the program's name that are complete, and the one at the cursor."""
    words = line.split()[1:]
    current = "" if not words or line[-1].isspace() else words.pop()
    # Of the options, -m alone changes what Hydra offers.
    before = [
        word
        for previous, word in zip(["", *words], words, strict=False)
        if previous not in OPTIONS_WITH_VALUE and (not word.startswith("-") or word in ("-m", "--multirun"))
    ]
    return before, current


def _complete_recipe(words: Sequence[str], verb: str, before: list[str], current: str) -> None:
    flags = [word for word in before if word.startswith("-")]
    request = read_request([word for word in before if word not in flags])
    if request.recipe is None and "=" not in current and (names := _recipe_names(current)):
        # A recipe comes first; without one Hydra would compose a config only to offer its bare keys.
        print(" ".join(names))
    elif verb in WITH_OVERRIDES and not current.startswith("-"):
        # Hydra's plugin knows a group's options, but not that they can go to a place.
        placed = _PLACED_OPTION.fullmatch(current)
        asked, place = (f"{placed['group']}={placed['option']}", placed["place"]) if placed else (current, "")
        with redirect_stdout(StringIO()) as answer:
            _ask_hydra(words, request, " ".join([*flags, *request.hydra_words(), asked]))
        print(answer.getvalue().replace("=", f"{place}="), end="")


def _recipe_names(prefix: str) -> list[str]:
    from mlotool import config

    return [info.name for info in config.list_recipes() if info.name.startswith(prefix)]


def _ask_hydra(words: Sequence[str], request: Request, line: str) -> None:
    from mlotool import config
    from mlotool.cli.hydra_app import call_hydra, never

    config.register_sources([] if request.file is None else [request.file.parent])
    # Hydra's plugin knows no verbs, and strips the program's name by itself.
    os.environ["COMP_LINE"] = f"mlotool {line}"
    call_hydra(["-sc", *words], never)
