"""What all data for language models shares: texts by domain go in, splits of windows come out, which are samples."""

import hashlib
import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from mlotool.core.errors import ConfigError
from mlotool.core.messages import did_you_mean
from mlotool.data.splits import AbstractData, check_literal

# n: windows, b: batch, t: length of a window

Batch = dict[str, Tensor]


class TextWindows(Dataset[Batch]):
    """One split: places in a text, at each of which a window of `length + 1` tokens begins.

    Batches are `{"input": (b, t), "target": (b, t), "domain": (b,), "index": (b,)}`, all int64. The input is a window
    without its last token, the target the same without its first one, so `target[:, i]` follows `input[:, i]`; `index`
    is the window's position in this split. The text stays in its own dtype: bytes take an eighth of int64.

    Args:
        tokens: (number of tokens,), a whole text, of whole numbers.
        starts: (n,) int64, where the windows begin in it.
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
END = 0
"""The byte that ends each document."""

_log = logging.getLogger(__name__)

Shares = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class LanguageOptions:
    """The keywords that data for language models has.

    Args:
        sizes: number of windows by split name.
        shares: by split name, what part of it comes from which domain: `{train: {code: 3, prose: 1}}` is three
            quarters code. They need not add up to 1; a domain that is left out has none; a split that is left out
            takes the same number of windows from each domain.
        length: t, tokens that a model sees of a window; the window has one more, the last target.
        vocabulary_size: number of tokens there are.
        seed: decides where in each domain's text the splits lie.
        sha256: first digits of the texts' SHA-256 that results were measured on; None: any.
    """

    sizes: Mapping[str, int]
    shares: Shares
    length: int
    vocabulary_size: int
    seed: int = 0
    sha256: str | None = None


class AbstractLanguageData(AbstractData[TextWindows]):
    """Base of the data for language models; a leaf reads texts and hands them to this constructor.

    The documents of a domain follow each other in one text, which is cut into windows of t + 1 tokens that do not
    overlap. Each split takes windows that lie next to each other, so two splits share no token and, but for the
    documents at the seams, no document. The text counts as a ring: where on it the first split begins depends on
    the seed. `train` comes last, so the other splits stay the same when its size changes. Batches are those of
    `TextWindows`.

    Args:
        texts: by domain, all its documents as one text, (number of tokens,) of whole numbers; a window's `domain` is
            the number of its domain in this order.
        options: what the recipe asks for.

    Attributes:
        domains: their names.
        sha256: of the texts, in hexadecimal digits.

    Raises:
        ConfigError: the options do not fit the texts.

    Warns:
        UserWarning: the texts are not those that `options.sha256` tells.
    """

    def __init__(self, texts: Mapping[str, Tensor], options: LanguageOptions) -> None:
        self.domains = tuple(texts)
        self.num_classes = self.vocabulary_size = options.vocabulary_size
        self.length, self.num_domains = options.length, len(texts)
        self.sha256 = text_hash(texts)
        _log.info("The text of %s has the SHA-256 %s.", ", ".join(texts), self.sha256)
        check_hash(self.sha256, options.sha256)
        counts = {
            name: apportion(int(size), _shares_of(name, options.shares, self.domains))
            for name, size in options.sizes.items()
            if size
        }
        _check_split_names(options)
        places = [
            _stretches(name, len(text), {split: counts[split][number] for split in counts}, options, number)
            for number, (name, text) in enumerate(texts.items())
        ]
        tokens, begins = torch.cat(list(texts.values())), _begins(texts)
        super().__init__(
            {
                split: _windows(
                    tokens, [begin + each[split] for begin, each in zip(begins, places, strict=True)], options
                )
                for split in counts
            }
        )


def apportion(size: int, shares: Sequence[float]) -> list[int]:
    """Divide a whole number by shares, by the largest remainders.

    Args:
        size: what is divided, 0 or more.
        shares: of any sum above 0.

    Returns:
        Whole numbers that add up to `size`, each less than 1 away from its exact share.

    Example:
        >>> apportion(10, [1.0, 1.0, 1.0])
        [4, 3, 3]
    """
    exact = [size * share / sum(shares) for share in shares]
    counts = [int(each) for each in exact]
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


def text_hash(texts: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of texts with the names of their domains, in hexadecimal digits."""
    found = hashlib.sha256()
    for name, text in texts.items():
        found.update(name.encode() + b"\0" + text.numpy().tobytes() + b"\0")
    return found.hexdigest()


def check_hash(found: str, expected: str | None) -> None:
    """Say where results were measured on another text."""
    if expected is not None and not found.startswith(str(expected).lower()):
        warnings.warn(
            f"data.sha256: the text has {found[:12]}, not {str(expected)[:12]}, on which results were measured; expect "
            "somewhat other figures. Another version of Python, or of the files, has other text. With a text of yours "
            "in the place of a recipe's, write ~data.sha256.",
            stacklevel=2,
        )


def check_vocabulary(vocabulary_size: int) -> None:
    """Raise ConfigError unless the vocabulary is that of bytes."""
    check_literal("vocabulary_size", vocabulary_size, BYTES, "as tokens are bytes")


def check_domains(found: Sequence[str], known: Sequence[str]) -> None:
    """Raise ConfigError unless these domains are some of those there are, each once."""
    for name in found:
        if name not in known:
            raise ConfigError(
                f"data.domains: found '{name}'; expected some of {', '.join(known)}.{did_you_mean(str(name), known)} "
                "Correct the name."
            )
    if not found or len(set(found)) < len(found):
        raise ConfigError(
            f"data.domains={list(found)}; expected at least one domain, each once. Set data.domains=[{known[0]}]."
        )


def _shares_of(split: str, shares: Shares, domains: Sequence[str]) -> list[float]:
    own = shares.get(split) or dict.fromkeys(domains, 1.0)
    for name, share in own.items():
        if name not in domains:
            raise ConfigError(
                f"data.shares.{split}: found '{name}'; expected some of {', '.join(domains)}, which data.domains "
                f"names.{did_you_mean(name, domains)} Correct the name, or add it to data.domains; with a text of "
                "yours in the place of a recipe's, write ~data.shares."
            )
        if not share >= 0:
            raise ConfigError(f"data.shares.{split}.{name}={share}; expected 0 or more. Set it to 0 to leave it out.")
    if not sum(own.values()):
        raise ConfigError(
            f"data.shares.{split}: found 0 for all domains; expected a share above 0. Set data.shares.{split}."
            f"{domains[0]}=1, or data.sizes.{split}=0."
        )
    return [float(own.get(name, 0.0)) for name in domains]


def _check_split_names(options: LanguageOptions) -> None:
    for split, size in options.sizes.items():
        if size < 0:
            raise ConfigError(f"data.sizes.{split}={size}; expected 0 or more windows. Set data.sizes.{split}=100.")
    for split in options.shares:
        if split not in options.sizes:
            raise ConfigError(
                f"data.shares names the split '{split}'; expected some of {', '.join(options.sizes)}, which data.sizes "
                f"names.{did_you_mean(split, list(options.sizes))} Correct the name, or remove data.shares.{split}."
            )


def _stretches(
    domain: str, num_tokens: int, counts: Mapping[str, int], options: LanguageOptions, number: int
) -> dict[str, Tensor]:
    """Return by split where its windows of one domain begin in that domain's text."""
    num_windows, wanted = num_tokens // (options.length + 1), sum(counts.values())
    if wanted > num_windows:
        raise ConfigError(
            f"data.sizes asks for {wanted} windows of '{domain}'; expected at most {num_windows}, as its {num_tokens} "
            f"tokens have no more of data.length + 1 = {options.length + 1}. Lower data.sizes or data.length."
        )
    if not wanted:
        return {split: torch.empty(0, dtype=torch.int64) for split in counts}
    first = int(np.random.default_rng([options.seed, number]).integers(num_windows))
    order = (torch.arange(num_windows) + first) % num_windows * (options.length + 1)
    places, begin = {}, 0
    for split in sorted(counts, key=lambda name: (name == "train", name)):
        places[split] = order[begin : begin + counts[split]]
        begin += counts[split]
    return places


def _begins(texts: Mapping[str, Tensor]) -> list[int]:
    return [0, *np.cumsum([len(text) for text in texts.values()])[:-1].tolist()]


def _windows(tokens: Tensor, places: Sequence[Tensor], options: LanguageOptions) -> TextWindows:
    domain = torch.cat([torch.full((len(each),), number) for number, each in enumerate(places)])
    return TextWindows(tokens, torch.cat(list(places)), domain, options.length)
