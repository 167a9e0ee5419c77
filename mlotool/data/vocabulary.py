"""From text to token ids without a download: the words of the train split, or a tokenizer that lies on the disk."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from mlotool.core.errors import ConfigError
from mlotool.core.files import at_home

# n: texts, t: length in tokens

PADDING, UNKNOWN = 0, 1


class Encoder(Protocol):
    """Turns texts into token ids."""

    def encode(self, texts: Sequence[str], length: int) -> Tensor:
        """Return (n, t) int64, cut or padded to `length` tokens."""


class Vocabulary:
    """The commonest words of some texts; ids begin with 0 for padding and 1 for what is unknown.

    Words are runs of letters, digits and apostrophes, in lower case; every other sign but space is a word of its own.

    Args:
        words: with the ids 2, 3, ...

    Example:
        >>> Vocabulary.of(["A good film.", "a bad one"], max_size=5).encode(["a good one"], length=4)
        tensor([[2, 1, 1, 0]])
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.words = ("<padding>", "<unknown>", *words)
        self._ids = {word: number for number, word in enumerate(self.words)}

    @classmethod
    def of(cls, texts: Sequence[str], max_size: int) -> "Vocabulary":
        """Return the vocabulary of `texts`, at most `max_size` with the two special ones.

        Words that are as common are taken in the order of the alphabet, so that it does not depend on the texts' order.
        """
        counts = Counter(word for text in texts for word in split_words(text))
        ranked = sorted(counts, key=lambda word: (-counts[word], word))
        return cls(ranked[: max(max_size - 2, 0)])

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, texts: Sequence[str], length: int) -> Tensor:
        """Return (n, t) int64; what is longer loses its end, what is shorter ends with padding."""
        ids = torch.full((len(texts), length), PADDING, dtype=torch.int64)
        for row, text in enumerate(texts):
            found = [self._ids.get(word, UNKNOWN) for word in split_words(text)[:length]]
            ids[row, : len(found)] = torch.tensor(found, dtype=torch.int64)
        return ids


def split_words(text: str) -> list[str]:
    """Return the words of a text, in lower case."""
    return re.findall(r"[\w']+|[^\w\s]", text.lower())


class LocalTokenizer:
    """A Hugging Face tokenizer from a folder on this machine; nothing is downloaded.

    Args:
        path: the folder, as `save_pretrained` writes it.
        vocabulary_size: of the models, at least its number of tokens.

    Raises:
        ConfigError: transformers is not installed, there is no tokenizer in the folder, or it has too many tokens.
    """

    def __init__(self, path: str, vocabulary_size: int) -> None:
        self._tokenizer = load_tokenizer(path, vocabulary_size)
        # A model has to tell padding from words by its id.
        if self._tokenizer.pad_token_id is None or int(self._tokenizer.pad_token_id) != PADDING:
            raise ConfigError(
                f"data.tokenizer={path}: its padding has the id {self._tokenizer.pad_token_id}; expected {PADDING}, as "
                "BERT's has. Use another tokenizer, or data.tokenizer=null."
            )

    def encode(self, texts: Sequence[str], length: int) -> Tensor:
        """Return (n, t) int64, with the tokenizer's own first and last token."""
        found = self._tokenizer(list(texts), truncation=True, max_length=length, padding="max_length")
        return torch.tensor(found["input_ids"], dtype=torch.int64)


def load_tokenizer(path: str, vocabulary_size: int) -> Any:
    """Return the Hugging Face tokenizer of a folder on this machine; nothing is downloaded, no code of it is run.

    Args:
        path: the folder, as `save_pretrained` writes it.
        vocabulary_size: of the models, at least its number of tokens.

    Raises:
        ConfigError: transformers is not installed, there is no tokenizer in the folder, or it has too many tokens.
    """
    try:
        from transformers import AutoTokenizer  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise ConfigError(
            f"data.tokenizer={path} needs transformers, which is not installed; expected it, or data.tokenizer=null. "
            "Run pip install 'mlotool[text]'."
        ) from error
    folder = at_home(path)
    try:
        # Transformers takes a folder that is missing for a name on its Hub, and says that it cannot connect.
        if not folder.is_dir():
            raise FileNotFoundError("there is no such folder")
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"data.tokenizer={path}: no tokenizer could be read ({str(error).splitlines()[0]}); expected a folder with "
            "tokenizer.json, as save_pretrained writes it. Correct data.tokenizer, or set it to null."
        ) from error
    if len(tokenizer) > vocabulary_size:
        raise ConfigError(
            f"data.vocabulary_size={vocabulary_size}; expected at least {len(tokenizer)}, the tokens of "
            f"data.tokenizer={path}. Set data.vocabulary_size={len(tokenizer)}."
        )
    return tokenizer
