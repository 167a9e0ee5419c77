"""`mlotool -sc query=bash`: what could stand where the cursor is; `-sc install=bash`: the script that asks.

What is offered is filtered: Hydra's own completion would hand a shell whatever a recipe says.
"""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout, suppress
from glob import escape, glob
from io import StringIO
from typing import Any

from mlotool.cli.arguments import Request, read_request
from mlotool.cli.main import VERBS
from mlotool.core.errors import ConfigError

WITH_OVERRIDES = ("run", "show", "validate")
WITH_RECIPE = (*WITH_OVERRIDES, "copy")
OPTIONS_WITH_VALUE = ("--trust", "-cd", "--config-dir")
SHELLS = ("bash", "zsh", "fish")
# A shell expands what it is offered: `$(..)` in a recipe would be run. This leaves out ${..} and ??? as well.
_HARMLESS = re.compile(r"[\w.,:@+~/=%\-]+")


def main(words: Sequence[str]) -> int:
    """Answer a shell."""
    command, _, shell = (words[0] if words else "").partition("=")
    if len(words) != 1 or command not in ("install", "uninstall", "query") or shell not in SHELLS:
        raise ConfigError(
            f"Found '-sc {' '.join(words)}'; expected install=SHELL or uninstall=SHELL with {', '.join(SHELLS)}. "
            'Write: eval "$(mlotool -sc install=bash)"'
        )
    if command == "query":
        offers = sorted(filter(_HARMLESS.fullmatch, set(_offers(os.environ.get("COMP_LINE", "")))))
        print(("\n" if shell == "fish" else " ").join(offers))
    else:
        print(_script(words), end="")
    return 0


def _script(words: Sequence[str]) -> str:
    from mlotool.cli.hydra_app import call_hydra, never

    with redirect_stdout(StringIO()) as script:
        call_hydra([], never, ["-sc", *words])
    # To bash an @ begins a new word, unless it is told otherwise, as Hydra does for the =.
    return script.getvalue().replace("${COMP_WORDBREAKS//=}", "${COMP_WORDBREAKS//[=@]}")


def _offers(line: str) -> Iterator[str]:
    before, current = _split(line)
    if not before:
        yield from (verb for verb in VERBS if verb.startswith(current))
    elif before[0] in WITH_RECIPE and not current.startswith("-"):
        # A line that would fail has no completions; its error comes when it is run.
        with suppress(ConfigError, RecursionError):
            request = read_request(before[1:])
            names = _recipe_names(current) if request.recipe is None and "=" not in current else []
            # A recipe comes first; the keys that there are without one are bare.
            if names or before[0] not in WITH_OVERRIDES:
                yield from names
            else:
                yield from _override_offers(request, current)


def _split(line: str) -> tuple[list[str], str]:
    """Return the words behind the program's name that are complete, options left out, and the one at the cursor."""
    words = line.split()[1:]
    current = "" if not words or line[-1].isspace() else words.pop()
    before = [
        word
        for previous, word in zip(["", *words], words, strict=False)
        if previous not in OPTIONS_WITH_VALUE and not word.startswith("-")
    ]
    return before, current


def _recipe_names(prefix: str) -> list[str]:
    from mlotool import config

    return [info.name for info in config.list_recipes() if info.name.startswith(prefix)]


def _override_offers(request: Request, current: str) -> Iterator[str]:
    from mlotool.config.schema import GROUPS

    address, equals, value = current.partition("=")
    name = address.lstrip("+~")
    sign = address.removesuffix(name)
    # An option can go to a place of its own: model@problems.classifier.module=resnet8
    group, at, _ = name.partition("@")
    if equals and value.startswith((".", "/")):
        # Not Path.glob, which takes the ./ away that was typed.
        yield from (f"{address}={path}" for path in glob(escape(value) + "*"))  # noqa: PTH207
    elif equals and group in GROUPS:
        yield from (f"{address}={option}" for option in _options(group) if option.startswith(value))
    elif not at:
        end = "" if sign == "~" else "="
        yield from (f"{sign}{each}{end}" for each in GROUPS if each.startswith(name) and not equals)
        # A plus is for new keys, and few may be deleted.
        if sign in ("", "++"):
            yield from (sign + each for each in _keys(request, name, value if equals else None))


def _options(group: str) -> list[str]:
    from mlotool.config.options import option_names
    from mlotool.config.recipes import GROUP

    return _recipe_names("") if group == GROUP else option_names(group)


def _keys(request: Request, key: str, value: str | None) -> Iterator[str]:
    """Yield the keys that begin with `key`, or its own value where that begins with `value`."""
    from omegaconf import OmegaConf

    from mlotool.config.composition import compose_words, is_sweep
    from mlotool.config.sources import sources

    recipes = [f"+recipe={name}" for name in request.recipe_names()[:1]]
    with sources([] if request.file is None else [request.file.parent]):
        words = [*recipes, *(word for word in request.overrides if not is_sweep(word))]
        node: Any = OmegaConf.to_container(compose_words(words), resolve=False)
    parent, dot, last = key.rpartition(".")
    for part in parent.split(".") if parent else ():
        node = _children(node).get(part)
    for name, child in _children(node).items():
        is_open = isinstance(child, dict | list)
        if value is None and name.startswith(last):
            yield f"{parent}{dot}{name}{'.' if is_open else '='}"
        elif value is not None and name == last and not is_open and child is not None:
            # YAML writes booleans small.
            text = str(child).lower() if isinstance(child, bool) else str(child)
            yield from [f"{key}={text}"] if text.startswith(value) else []


def _children(node: Any) -> dict[str, Any]:
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return {str(key): value for key, value in items}
