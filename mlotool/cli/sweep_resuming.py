"""`mlotool run -m ... resume=auto`: the folder of the sweep that goes on, in which each job finds its own."""

import sys
from pathlib import Path

from mlotool.cli.request import Request
from mlotool.config.paths import is_literal
from mlotool.config.reading import parse_document
from mlotool.core.errors import ConfigError
from mlotool.core.run_files import MAX_CONFIG_BYTES, check_tree, read_text
from mlotool.sweep.folder import FILE as PROCESSES_FILE

FILE = "multirun.yaml"


def resumed_sweep(request: Request) -> list[str]:
    """Return the words that make Hydra use the folder of the sweep to go on with; none for a new sweep.

    Args:
        request: its `resume` is auto, for the newest sweep by the same words, or the folder of a sweep.

    Raises:
        ConfigError: the folder is none of a sweep.
    """
    values = [word.partition("=")[2].strip("'\"") for word in request.overrides if word.startswith("resume=")]
    if not values or values[-1] == "null" or any(word.startswith("hydra.sweep.dir=") for word in request.overrides):
        return []
    if values[-1] != "auto":
        folder = Path(values[-1])
        if not is_literal(values[-1]):
            raise ConfigError(
                f"resume: found '{folder}'; expected a folder without '$' and backslashes in its path, which Hydra "
                "would resolve. Rename it."
            )
        if (folder / PROCESSES_FILE).is_file():
            raise ConfigError(
                f"resume: found '{folder}', a sweep that ran in processes of its own; expected the settings that it "
                "had as well, such as sweep.workers=2 or sweep=optuna. Add them."
            )
        if not (folder / FILE).is_file():
            raise ConfigError(
                f"resume: found '{folder}' with -m, which has no {FILE}; expected auto, or the folder of a sweep "
                "(outputs/<name>/multirun/<date>_<time>). Leave -m out to go on with one run."
            )
        check_tree(folder)
        before, now = (_recipes(words) for words in (_words_of(folder / FILE), request.hydra_words()))
        if before and before != now:
            raise ConfigError(
                f"resume: found '{folder}', a sweep of {', '.join(before)}, with {', '.join(now)}; expected the same "
                "recipe. Name it, or leave resume out for a new sweep."
            )
        # The jobs look in their own folders.
        return [f"hydra.sweep.dir={_quoted(folder)}", "resume=auto"]
    wanted = _said(request.hydra_words())
    sweeps = Path("outputs").glob(f"*/multirun/*/{FILE}")
    # A link may lead to a sweep of another place.
    own = (file for file in sweeps if is_literal(str(file)) and not file.parent.is_symlink())
    same = [file.parent for file in own if _said(_words_of(file)) == wanted]
    if not same:
        print("mlotool: resume=auto: no sweep by these words. A new one begins.", file=sys.stderr)
        return []
    newest = max(same, key=lambda folder: folder.name)
    check_tree(newest)
    print(f"mlotool: going on with the sweep in {newest}", file=sys.stderr)
    return [f"hydra.sweep.dir={_quoted(newest)}"]


def _said(words: list[str]) -> list[str]:
    """Return the words that say which sweep it is, in a fixed order."""
    from mlotool.config.difference import may_differ

    pairs = [(word.lstrip("+~").partition("=")[0], word) for word in words]
    return sorted(word for key, word in pairs if not may_differ(key) and not key.startswith("hydra."))


def _recipes(words: list[str]) -> list[str]:
    return [word.lstrip("+") for word in words if word.lstrip("+").startswith("recipe=")]


def _words_of(file: Path) -> list[str]:
    try:
        text = read_text(file.parent, file.name, MAX_CONFIG_BYTES)
        config = parse_document(file, text or "", is_fast=True).data
        return [str(word) for word in config["hydra"]["overrides"]["task"]]
    # Of a sweep that was killed while it wrote, of another version of Hydra, or of a stranger.
    except (ConfigError, KeyError, TypeError):
        return []


def _quoted(folder: Path) -> str:
    return "'" + str(folder).replace("'", "\\'") + "'"
