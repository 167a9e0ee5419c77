"""Python's own documentation and sources as text for language models: no download, no network."""

from collections.abc import Mapping, Sequence

from mlotool.core.settings import Count, Rounds, Seed, Whole, target
from mlotool.data.language_data import (
    BYTES,
    AbstractLanguageData,
    LanguageOptions,
    Shares,
    as_tokens,
    check_domains,
    check_vocabulary,
    joined,
)
from mlotool.data.python_sources import PYTHON_DOMAINS, read_domain
from mlotool.data.splits import check_literal


@target("data")
class PythonText(AbstractLanguageData):
    """Bytes of the text that comes with Python, in five domains.

    | domain | what | bytes in 3.11 |
    |---|---|---|
    | documentation | the language reference, which `help("topics")` lists; each paragraph once | 0.38 million |
    | docstrings | of about 100 modules of the standard library | 0.69 million |
    | code | the same modules without their docstrings | 2.5 million |
    | tables | the sources of the character sets, encodings/*.py | 1.4 million |
    | scrambled | the docstrings with the letters of each line in a random order | 0.69 million |

    The text depends on the version of Python, which `sha256` tells. How it is split stands in `AbstractLanguageData`.

    Args:
        sizes: number of windows by split name.
        domains: which of them there are; a window's `domain` is the number of its domain in this list.
        shares: by split and domain; see `LanguageOptions`.
        num_domains: must be the length of `domains`; it stands in the configuration so that models can refer to it.
            None: not looked at.
        vocabulary_size: 256; likewise.
        length: tokens that a model sees of a window.
        seed: of the splits.
        sha256: first digits of the hash of the text that results were measured on; None: any.

    Raises:
        ConfigError: the options do not fit the text, or this Python has no sources on the disk.

    Example:
        >>> data = PythonText({"train": 100, "test": 20}, ["documentation"], length=32)
        >>> data.split("train").__getitems__([0, 1])["input"].shape
        torch.Size([2, 32])
    """

    def __init__(
        self,
        sizes: Mapping[str, Whole],
        domains: Sequence[str] = ("documentation",),
        shares: Shares | None = None,
        num_domains: Count | None = None,
        vocabulary_size: Count = BYTES,
        length: Rounds = 64,
        seed: Seed = 0,
        sha256: str | None = None,
    ) -> None:
        check_vocabulary(vocabulary_size)
        check_domains(domains, tuple(PYTHON_DOMAINS))
        if num_domains is not None:
            check_literal("num_domains", num_domains, len(domains), "the length of data.domains")
        texts = {name: as_tokens(joined(read_domain(name))) for name in domains}
        super().__init__(texts, LanguageOptions(sizes, shares or {}, length, BYTES, seed, sha256))
