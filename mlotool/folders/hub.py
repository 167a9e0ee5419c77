"""Models and tokenizers of Hugging Face: their folders, and names on its Hub where the user has allowed that.

A recipe may name a model on the Hub, but only the user may let one be fetched: `--allow-hub` on the command line, or
`allow_hub=True` in Python. Then files of tensors (safetensors), JSON and texts are fetched, at a commit that is fixed
before the run begins. No code and no pickle is fetched or run.
"""

import os
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from mlotool.core.errors import ConfigError
from mlotool.core.messages import is_command_line
from mlotool.folders.documents import leaves
from mlotool.folders.files import at_home

# Settings that name a folder of Hugging Face's.
KEYS = ("pretrained", "tokenizer")
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.txt"),
    *("vocab.json", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "chat_template.jinja"),
)
_FETCHED = (CONFIG, WEIGHTS, INDEX, "model-*-of-*.safetensors", "generation_config.json", *TOKENIZER_FILES)
# `name` or `owner/name`, and a commit, branch or tag of it.
_NAME = re.compile(r"(?P<repository>\w[\w.-]{0,95}(/\w[\w.-]{0,95})?)(@(?P<revision>\w[\w.-]{0,99}))?", re.ASCII)
# Ranks and jobs of a sweep, which are processes of their own, have it of the process that starts them.
_VARIABLE = "MLOTOOL_ALLOW_HUB"


def allow_hub() -> None:
    """Let this process, and those that it starts, fetch models and tokenizers that are named on the Hub."""
    os.environ[_VARIABLE] = "1"


def is_allowed() -> bool:
    """Say whether the user has allowed it."""
    return os.environ.get(_VARIABLE) == "1"


def is_name(source: str) -> bool:
    """Say whether a text is no folder here, and may be a name on the Hub.

    Example:
        >>> is_name("openai-community/gpt2"), is_name("gpt2@607a30d783"), is_name("../gpt2"), is_name("a/b/c")
        (True, True, False, False)
    """
    match = _NAME.fullmatch(source)
    return match is not None and ".." not in source and "--" not in source and not at_home(source).exists()


def folder_of(key: str, source: str) -> Path:
    """Return the folder of a model or tokenizer: one on this machine, or what the Hub has, where that is allowed.

    Args:
        key: of the setting that names it.
        source: a folder, or a name on the Hub.

    Raises:
        ConfigError: there is no such folder and no name is allowed, or the Hub does not give it.
    """
    if at_home(source).is_dir():
        return at_home(source)
    if not is_name(source):
        raise ConfigError(f"{key}: found '{source}', which is not a folder; expected one. Correct {key}.")
    if not is_allowed():
        how = "--allow-hub on the command line" if is_command_line() else "allow_hub=True"
        raise ConfigError(
            f"{key}: found '{source}', which is not a folder; expected a folder on this machine, as downloads need "
            f"your permission. Correct {key}; or, if it is a name on the Hugging Face Hub, allow the download by {how}."
        )
    match = _NAME.fullmatch(source)
    assert match is not None
    return Path(_asked(key, source, "snapshot_download", match, allow_patterns=list(_FETCHED)))


def pinned(key: str, source: str) -> str:
    """Return a name on the Hub with the commit that it stands for now: `gpt2@607a30d783dfa663caf39e06633721c8d4cfcd7e`.

    Of what is in the cache of this machine the commit is known without a network (HF_HUB_OFFLINE=1).

    Raises:
        ConfigError: the Hub does not give it.
    """
    match = _NAME.fullmatch(source)
    assert match is not None
    # The cache keeps the files of a repository in a folder with the name of their commit.
    commit = Path(_asked(key, source, "hf_hub_download", match, filename=CONFIG)).parent.name
    return f"{match['repository']}@{commit}"


def names_in(config: Any) -> Iterator[tuple[str, str]]:
    """Yield the settings of a plain config that name a model or a tokenizer on the Hub, with their values."""
    nodes = {key: config[key] for key in ("data", "problems") if key in config}
    for key, value in leaves(nodes):
        if key.rpartition(".")[2] in KEYS and isinstance(value, str) and "${" not in value and is_name(value):
            yield key, value


def _asked(key: str, source: str, function: str, match: re.Match[str], **options: Any) -> str:
    try:
        hub = import_module("huggingface_hub")
    except ImportError as error:
        raise ConfigError(
            f"{key}: found '{source}', which needs huggingface_hub, which is not installed; expected it. Run pip "
            "install 'mlotool[text]'."
        ) from error
    try:
        found: str = getattr(hub, function)(match["repository"], revision=match["revision"], **options)
    except (OSError, ValueError, RuntimeError) as error:
        said = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ConfigError(
            f"{key}: found '{source}', which could not be downloaded from the Hugging Face Hub ({said}); expected a "
            f"model with {CONFIG} and {WEIGHTS}. Correct the name, or give a folder."
        ) from error
    return found
