"""`mlotool -sc query=bash`: what could stand where the cursor is; `-sc install=bash`: the script that asks."""

import os
from collections.abc import Sequence
from contextlib import suppress

from mlotool.cli.main import VERBS
from mlotool.cli.request import Request, read_request
from mlotool.core.errors import ConfigError

WITH_OVERRIDES = ("run", "show", "validate")
WITH_RECIPE = (*WITH_OVERRIDES, "copy")
OPTIONS_WITH_VALUE = ("--trust", "-cd", "--config-dir")
SHELLS = ("bash", "zsh", "fish")


def main(words: Sequence[str]) -> int:
    """Answer a shell."""
    command, _, shell = (words[0] if words else "").partition("=")
    if len(words) != 1 or command not in ("install", "uninstall", "query") or shell not in SHELLS:
        raise ConfigError(
            f"Found '-sc {' '.join(words)}'; expected install=SHELL or uninstall=SHELL with {', '.join(SHELLS)}. "
            'Write: eval "$(mlotool -sc install=bash)"'
        )
    if command != "query":
        _ask_hydra(words, Request(None, None, ()), "")
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
        _ask_hydra(words, request, " ".join([*flags, *request.hydra_words(), current]))


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
