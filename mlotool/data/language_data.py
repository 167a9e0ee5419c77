"""Data for language models: how texts of several domains become splits of windows; and text files of your own."""

import hashlib
import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from mlotool.core.arguments import require
from mlotool.core.errors import ConfigError
from mlotool.core.settings import Count, NonNegative, Rounds, Seed, target
from mlotool.data.splits import AbstractData, Sizes, check_literal, require_known
from mlotool.data.text_data import load_tokenizer
from mlotool.folders.files import at_home
from mlotool.folders.texts import files_by_domain

# n: windows, b: batch, t: length of a window

Batch = dict[str, Tensor]


class TextWindows(Dataset[Batch]):
    """One split: windows of `length + 1` tokens of a text.

    Batches are `{"input": (b, t), "target": (b, t), "domain": (b,), "index": (b,)}`, all int64. The input is a window
    without its last token, and the target is the window without its first token, so `target[:, i]` follows `input[:,
    i]`; `index` is the window's position in this split. The text is kept in its own dtype, since bytes take an eighth
    of the memory of int64.

    Args:
        tokens: (number of tokens,), token ids of a whole text.
        starts: (n,) int64, the positions in the text at which the windows begin.
        domain: (n,) int64, the number of each window's domain.
        length: t.

    Example:
        >>> dataset = TextWindows(torch.tensor(list(b"abcdef")), torch.tensor([0, 3]), torch.tensor([0, 0]), length=2)
        >>> bytes(dataset[1]["input"].tolist()), bytes(dataset[1]["target"].tolist())
        (b'de', b'ef')
    """

    def __init__(self, tokens: Tensor, starts: Tensor, domain: Tensor, length: int) -> None:
        assert len(starts) == len(domain), (starts.shape, domain.shape)
        assert not len(starts) or int(starts.max()) + length < len(tokens), (int(starts.max()), length, len(tokens))
        self.tokens, self.starts, self.domain, self.length = tokens, starts, domain, length
        self._places = torch.arange(length + 1)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Batch:
        """Return one sample, without the batch's axis."""
        return {name: values[0] for name, values in self.__getitems__([index]).items()}

    def __getitems__(self, indices: Sequence[int] | Tensor) -> Batch:
        """Return a collated batch of the windows at `indices` (b,)."""
        index = torch.as_tensor(indices, dtype=torch.int64)
        window = self.tokens[self.starts[index][:, None] + self._places].to(torch.int64)
        return {"input": window[:, :-1], "target": window[:, 1:], "domain": self.domain[index], "index": index}


# t: length of a window

BYTES = 256
# The byte that ends each document.
END = 0

_log = logging.getLogger(__name__)

Shares = Mapping[str, Mapping[str, NonNegative]]


@dataclass(eq=False)
class AbstractLanguageData(AbstractData[TextWindows]):
    """Base class of data for language models, with their settings; a subclass reads texts and calls `_split`.

    The documents of a domain are concatenated to one text, which is cut into windows of t + 1 tokens that do not
    overlap. Each split takes consecutive windows. So two splits share no token, and no document except those at their
    ends. The seed decides where in the text, taken as a ring, the first split begins. `train` comes last, so the other
    splits do not change with its size. Batches are those of `TextWindows`.

    Args:
        sizes: number of windows by split name.
        domains: names of the domains to use; a window's `domain` is the position of its domain in this list. None: all.
        shares: by split name, the shares of the domains in it: `{train: {code: 3, prose: 1}}` is three quarters code.
            Shares need not add up to 1. A domain that is left out has no windows in that split; a split that is left
            out has the same number of windows from each domain.
        num_domains: must be the number of domains; models refer to it in the configuration. None: not checked.
        vocabulary_size: number of token ids.
        length: t, number of tokens that a model reads; a window has one more, the last target.
        seed: decides where in each domain's text the splits are.
        sha256: first digits of the SHA-256 of the texts that results were measured on; None: any text. The attribute
            has all digits.

    Raises:
        ConfigError: the settings do not fit the texts.

    Warns:
        UserWarning: the texts have another hash than `sha256`.
    """

    sizes: Sizes
    domains: Sequence[str] | None = None
    shares: Shares | None = None
    num_domains: Count | None = None
    vocabulary_size: Count = BYTES
    length: Rounds = 64
    seed: Seed = 0
    sha256: str | None = None

    def _split(self, texts: Mapping[str, Tensor]) -> None:
        """Draw the splits from texts, by domain all its documents as one text, (number of tokens,) whole numbers."""
        self.domains = tuple(texts)
        if self.num_domains is not None:
            check_literal("num_domains", self.num_domains, len(texts), f"as there are {', '.join(texts)}")
        self.num_classes, self.num_domains = self.vocabulary_size, len(texts)
        self.sha256 = checked_hash(texts, self.sha256)
        _log.info("The text of %s has the SHA-256 %s.", ", ".join(texts), self.sha256)
        for split in self.shares or ():
            require_known("data.shares", split, tuple(self.sizes))
        counts = self._counts(self.sizes)
        self._check_sizes({name: len(text) // (self.length + 1) for name, text in texts.items()})
        places = [
            self._stretches(len(text), {split: counts[split][number] for split in counts}, number)
            for number, text in enumerate(texts.values())
        ]
        begins = [0, *np.cumsum([len(text) for text in texts.values()])[:-1].tolist()]
        tokens, datasets = torch.cat(list(texts.values())), {}
        for split in counts:
            starts = [begin + of_domain[split] for begin, of_domain in zip(begins, places, strict=True)]
            domain = torch.cat([torch.full((len(start),), number) for number, start in enumerate(starts)])
            datasets[split] = TextWindows(tokens, torch.cat(starts), domain, self.length)
        super().__init__(datasets)

    def _counts(self, sizes: Sizes) -> dict[str, list[int]]:
        """Return by split the number of windows of each domain."""
        return {name: apportion(int(size), self._shares_of(name)) for name, size in sizes.items() if size}

    def _check_sizes(self, there: Mapping[str, int]) -> None:
        """Refuse sizes that texts cannot give, for all domains at once, and say sizes that they can.

        Args:
            there: number of windows by domain.
        """
        wanted = self._wanted(self.sizes)
        short = [name for name in there if wanted[name] > there[name]]
        if not short:
            return
        fitting, scale = dict(self.sizes), min(there[name] / wanted[name] for name in short)
        # Windows are whole, so what is rounded up may still be one too many.
        while any(self._wanted(fitting)[name] > there[name] for name in there) and scale > 0:
            fitting = {name: int(size * scale) for name, size in self.sizes.items()}
            scale = scale * 0.99 if any(fitting.values()) else 0.0
        sizes = f"{{{', '.join(f'{name}: {size}' for name, size in fitting.items())}}}"
        found, most = (" and ".join(f"{number[name]} of '{name}'" for name in short) for number in (wanted, there))
        advice = f"Set data.sizes='{sizes}', lower data.length, or change data.shares."
        raise ConfigError(
            f"data.sizes: found {found}, in windows of data.length + 1 = {self.length + 1} tokens; expected at most "
            f"{most}, as the texts have no more. {advice if all(fitting.values()) else 'Lower data.length.'}"
        )

    def _wanted(self, sizes: Sizes) -> dict[str, int]:
        counts = self._counts(sizes).values()
        return {name: sum(of_split[number] for of_split in counts) for number, name in enumerate(self.domains or ())}

    def _shares_of(self, split: str) -> list[float]:
        domains = tuple(self.domains or ())
        shares = (self.shares or {}).get(split) or dict.fromkeys(domains, 1.0)
        for name in shares:
            require_known(f"data.shares.{split}", name, domains, " With a text of yours, write ~data.shares.")
        require(sum(shares.values()) > 0, f"data.shares.{split}", shares, "a share above 0")
        return [float(shares.get(name, 0.0)) for name in domains]

    def _stretches(self, num_tokens: int, counts: Mapping[str, int], number: int) -> dict[str, Tensor]:
        """Return by split where its windows of one domain begin in that domain's text."""
        num_windows = num_tokens // (self.length + 1)
        if not any(counts.values()):
            return {split: torch.empty(0, dtype=torch.int64) for split in counts}
        first = int(np.random.default_rng([self.seed, number]).integers(num_windows))
        order = (torch.arange(num_windows) + first) % num_windows * (self.length + 1)
        places, begin = {}, 0
        for split in sorted(counts, key=lambda name: (name == "train", name)):
            places[split] = order[begin : begin + counts[split]]
            begin += counts[split]
        return places


def apportion(size: int, shares: Sequence[float]) -> list[int]:
    """Divide a whole number according to shares, by the largest-remainder method.

    Args:
        size: the number that is divided, 0 or more.
        shares: numbers with a sum above 0.

    Returns:
        Whole numbers that add up to `size`, each less than 1 away from its exact share.

    Example:
        >>> apportion(10, [1.0, 1.0, 1.0])
        [4, 3, 3]
    """
    exact = [size * share / sum(shares) for share in shares]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(shares)), key=lambda number: (counts[number] - exact[number], number))
    for number in by_remainder[: size - sum(counts)]:
        counts[number] += 1
    return counts


def as_tokens(text: bytes) -> Tensor:
    """Return the bytes of a text as tokens (number of bytes,), uint8."""
    return torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy())


def joined(documents: Sequence[bytes]) -> bytes:
    """Return documents as one text; a zero byte ends each of them."""
    return b"".join(document + bytes([END]) for document in documents)


def checked_hash(texts: Mapping[str, Tensor], expected: str | None) -> str:
    """Return the SHA-256 of texts with the names of their domains, in hexadecimal digits.

    Args:
        texts: by domain.
        expected: its first digits, of the texts that results were measured on; a warning says where it is another.
    """
    digest = hashlib.sha256()
    for name, text in texts.items():
        digest.update(name.encode() + b"\0" + text.numpy().tobytes() + b"\0")
    sha256 = digest.hexdigest()
    if expected is not None and not sha256.startswith(str(expected).lower()):
        warnings.warn(
            f"data.sha256: the text has the hash {sha256[:12]}, not {str(expected)[:12]}, on which results were "
            "measured; expect somewhat different results. Another version of Python, or of the files, has another "
            "text. If you use your own text, write ~data.sha256.",
            stacklevel=2,
        )
    return sha256


def check_vocabulary(vocabulary_size: int) -> None:
    """Raise ConfigError unless the vocabulary is that of bytes."""
    check_literal("vocabulary_size", vocabulary_size, BYTES, "as tokens are bytes")


def check_domains(names: Sequence[str], known: Sequence[str]) -> None:
    """Raise ConfigError unless these domains are some of those there are, each once."""
    for name in names:
        require_known("data.domains", name, known)
    is_right = bool(names) and len(set(names)) == len(names)
    require(is_right, "data.domains", list(names), "at least one domain, each once")


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
    beside the subfolders belong to a domain with the name of `path` itself. Documents are in the order of their paths.
    Files are read as bytes, so any encoding will do. See `AbstractLanguageData` for how texts are split.

    Args:
        path: a file or a folder.
        sizes: number of windows by split name.
        pattern: pattern of the files in a folder, such as `**/*.md`, where `**` is any depth.
        domains: names of the domains to use, in the order of their numbers; None: all, in alphabetical order.
        shares: by split name, the shares of the domains in it; see `AbstractLanguageData`.
        num_domains: must be the number of domains; models refer to it in the configuration. None: not checked.
        vocabulary_size: 256; with a tokenizer, at least its number of tokens. Models refer to it in the configuration.
        length: number of tokens that a model reads.
        tokenizer: folder of a Hugging Face tokenizer (pip install 'mlotool[text]'); None: tokens are bytes.
        seed: seed of the splits.
        sha256: first digits of the SHA-256 of the tokens that results were measured on; None: any tokens.

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
            texts = {name: as_tokens(joined(contents)) for name, contents in documents.items()}
        else:
            reader = load_tokenizer(self.tokenizer, self.vocabulary_size)
            texts = {name: _tokenized(reader, contents) for name, contents in documents.items()}
        self._split(texts)


def _read(path: Path, pattern: str) -> dict[str, list[bytes]]:
    """Return the documents by domain, both in the order of their names."""
    require(path.exists(), "data.path", str(path), "a text file that exists, or a folder with some")
    try:
        files = files_by_domain(path, pattern)
        documents = {domain: [file.read_bytes() for file in of_domain] for domain, of_domain in files.items()}
    except (OSError, ValueError, NotImplementedError) as error:
        raise ConfigError(
            f"data.path={path}: {str(error) or 'the pattern is none'}, with data.pattern={pattern!r}; expected text "
            "files that can be read. Correct their rights, or set data.pattern='**/*.txt'."
        ) from error
    expected = f"text in it, in files that match data.pattern={pattern}"
    require(bool(documents), "data.path", str(path), expected, "Correct data.path or data.pattern.")
    return documents


def _tokenized(tokenizer: Any, documents: Sequence[bytes]) -> Tensor:
    """Return documents as token ids (number of tokens,), int32, each with the tokenizer's mark of an end, if any."""
    end = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    ids: list[int] = []
    for document in documents:
        # Not verbose: a document is longer than any model's input, of which the tokenizer would warn.
        encoding = tokenizer(document.decode(errors="replace"), add_special_tokens=False, verbose=False)
        ids += [*encoding["input_ids"], *end]
    return torch.tensor(ids, dtype=torch.int32)
