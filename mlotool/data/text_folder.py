"""Text files of the user's as text for language models, as bytes or by a tokenizer."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlotool.core.arguments import require
from mlotool.core.errors import ConfigError
from mlotool.core.files import at_home
from mlotool.core.settings import target
from mlotool.data.language_data import AbstractLanguageData, as_tokens, check_domains, check_vocabulary, joined
from mlotool.data.splits import Sizes
from mlotool.data.text_data import load_tokenizer


@dataclass(eq=False)
class _FromPath:
    path: str
    sizes: Sizes
    pattern: str = "**/*.txt"


@target("data")
@dataclass(eq=False)
class TextFolder(AbstractLanguageData, _FromPath):
    """A text file, or all files of a folder that match a pattern; its subfolders are domains.

    A file in a subfolder of `path`, at any depth, is a document of the domain that has that subfolder's name; files
    beside the subfolders are of a domain with the name of `path` itself. Documents follow each other in the order of
    their paths. Files are read as bytes, so any encoding will do. How text is split stands in `AbstractLanguageData`.

    Args:
        path: a file or a folder.
        sizes: number of windows by split name.
        pattern: of the files in a folder, such as `**/*.md`, where `**` is any depth.
        domains: which of them there are, and in which order they are numbered; None: all, by name.
        shares: by split and domain; see `AbstractLanguageData`.
        num_domains: must be the number of domains; it stands in the configuration so that models can refer to it.
            None: not looked at.
        vocabulary_size: 256; with a tokenizer, at least its number of tokens; likewise.
        length: tokens that a model sees of a window.
        tokenizer: folder of a Hugging Face tokenizer, of which nothing is downloaded (pip install 'mlotool[text]');
            None: bytes.
        seed: of the splits.
        sha256: first digits of the hash of the tokens that results were measured on; None: any.

    Raises:
        ConfigError: there is no such file, there is no text in it, or the options do not fit it.
    """

    tokenizer: str | None = None

    def __post_init__(self) -> None:
        documents = _read(at_home(self.path), self.pattern)
        if self.domains is not None:
            check_domains(self.domains, tuple(documents))
            documents = {name: documents[name] for name in self.domains}
        if self.tokenizer is None:
            check_vocabulary(self.vocabulary_size)
            texts = {name: as_tokens(joined(each)) for name, each in documents.items()}
        else:
            reader = load_tokenizer(self.tokenizer, self.vocabulary_size)
            texts = {name: _tokenized(reader, each) for name, each in documents.items()}
        self._split(texts)


def _read(path: Path, pattern: str) -> dict[str, list[bytes]]:
    """Return the documents by domain, both in the order of their names."""
    require(path.exists(), "data.path", str(path), "a text file that exists, or a folder with some")
    files = [path] if path.is_file() else _matches(path, pattern)
    documents: dict[str, list[bytes]] = {}
    for file in files:
        inner = file.relative_to(path).parts if path.is_dir() else ()
        name = inner[0] if len(inner) > 1 else path.absolute().stem
        try:
            text = file.read_bytes()
        except OSError as error:
            raise ConfigError(
                f"data.path: {file} cannot be read ({error.strerror}); expected a text file. Correct its rights, or "
                "data.pattern."
            ) from error
        if text:
            documents.setdefault(name, []).append(text)
    expected = f"text in it, in files that match data.pattern={pattern}"
    require(bool(documents), "data.path", str(path), expected, "Correct data.path or data.pattern.")
    return dict(sorted(documents.items()))


def _matches(folder: Path, pattern: str) -> list[Path]:
    try:
        return sorted(file for file in folder.glob(pattern) if file.is_file())
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(
            f"data.pattern={pattern!r}: {str(error) or 'it is no pattern'}; expected one of paths below data.path. Set "
            "data.pattern='**/*.txt'."
        ) from error


def _tokenized(tokenizer: Any, documents: Sequence[bytes]) -> Tensor:
    """Return documents as token ids (number of tokens,), int32, each with the tokenizer's mark of an end, if any."""
    end = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    ids: list[int] = []
    for document in documents:
        # Not verbose: a document is longer than any model's input, of which the tokenizer would warn.
        found = tokenizer(document.decode(errors="replace"), add_special_tokens=False, verbose=False)
        ids += [*found["input_ids"], *end]
    return torch.tensor(ids, dtype=torch.int32)
