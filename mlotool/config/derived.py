"""Sizes that follow from the user's files, as references that options of conf/ have: `${num_tokens:${.tokenizer},256}`.

So models that refer to the data's sizes fit a folder of texts that nobody has counted. Recipes cannot write such
references.
"""

from collections.abc import Sequence
from functools import lru_cache

from omegaconf import OmegaConf

from mlotool.core.errors import ConfigError
from mlotool.folders import hub
from mlotool.folders.files import at_home
from mlotool.folders.texts import files_by_domain


def num_domains(path: str, pattern: str, domains: Sequence[str] | None) -> int:
    """Return the number of domains of `mlotool.data.TextFolder`; 1 where there is no text, as the data will say."""
    try:
        return max(len(files_by_domain(at_home(path), pattern)) if domains is None else len(domains), 1)
    except (OSError, ValueError, NotImplementedError):
        return 1


def num_tokens(tokenizer: str | None, otherwise: int) -> int:
    """Return the number of tokens of a tokenizer; `otherwise` where there is none, or none can be read."""
    if tokenizer is None:
        return otherwise
    try:
        folder = hub.folder_of("data.tokenizer", tokenizer)
        return _num_tokens(str(folder), folder.stat().st_mtime_ns)
    except (ConfigError, OSError):
        return otherwise


# A reference is resolved each time that somebody reads it.
@lru_cache(maxsize=8)
def _num_tokens(folder: str, changed_at: int) -> int:
    # Imported here: it needs torch.
    from mlotool.data.text_data import read_tokenizer

    return max(len(read_tokenizer(folder)), 1)


def register() -> None:
    """Make the references known to OmegaConf."""
    for resolver in (num_domains, num_tokens):
        OmegaConf.register_new_resolver(resolver.__name__, resolver, replace=True)
