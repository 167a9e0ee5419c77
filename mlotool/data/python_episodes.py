"""Few-shot language modelling: each sample is a task of its own, to go on with one document."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mlotool.core.arguments import require
from mlotool.core.settings import Count, NonNegative, Rounds, Seed, Whole, target
from mlotool.data.language_data import BYTES, apportion, as_tokens, check_domains, check_vocabulary, checked_hash
from mlotool.data.python_text import PYTHON_DOMAINS, read_domain
from mlotool.data.splits import AbstractData, InMemoryTensors, check_splits, drawn

# s: windows of a part of a task, t: length of a window

SPLITS = ("train", "val", "test")
SHARES = {"train": 0.7, "val": 0.1, "test": 0.2}


@target("data")
class PythonEpisodes(AbstractData[InMemoryTensors]):
    """Tasks out of Python's own text: some windows of a document to learn from, others of it to be judged by.

    A sample is a task, `{"support": {"input": (s, t) int64, "target": (s, t) int64}, "query": ..}`, with `"document"`
    and `"domain"`, numbers that tell where its windows are from; a batch has the tasks along its first axis. A
    document is a module's source, a topic of the language reference, and the like; see `PythonText`. No document is in
    the tasks of two splits, and no window in both parts of a task.

    Args:
        sizes: number of tasks by split name, out of `train`, `val` and `test`.
        domains: of `PythonText`, which the documents are from.
        shares: of the documents by split name; each domain's are divided so. None: SHARES.
        num_support: windows that a task is learned from.
        num_query: windows that the result is judged by.
        vocabulary_size: 256; it stands in the configuration so that models can refer to it.
        length: t, tokens that a model sees of a window.
        seed: of the division of documents and of the tasks; a split's tasks do not depend on the other splits' sizes.
        sha256: first digits of the hash of the text that results were measured on; None: any.

    Attributes:
        sha256: of the text, in hexadecimal digits.

    Raises:
        ConfigError: the options do not fit the text, or this Python has no sources on the disk.

    Example:
        >>> data = PythonEpisodes({"train": 20}, ["documentation"], num_support=2, num_query=2, length=32)
        >>> data.split("train").__getitems__([0, 1, 2])["support"]["input"].shape
        torch.Size([3, 2, 32])
    """

    def __init__(
        self,
        sizes: Mapping[str, Whole],
        domains: Sequence[str] = ("documentation", "code", "tables"),
        shares: Mapping[str, NonNegative] | None = None,
        num_support: Rounds = 4,
        num_query: Rounds = 4,
        vocabulary_size: Count = BYTES,
        length: Rounds = 64,
        seed: Seed = 0,
        sha256: str | None = None,
    ) -> None:
        check_vocabulary(vocabulary_size)
        check_splits(sizes, SPLITS)
        check_domains(domains, tuple(PYTHON_DOMAINS))
        self.num_classes = self.vocabulary_size = BYTES
        self.length, self.domains = length, tuple(domains)
        texts = {name: [as_tokens(document) for document in read_domain(name)] for name in domains}
        self.sha256 = checked_hash({name: torch.cat(each) for name, each in texts.items()}, sha256)
        documents = _documents(texts, num_support + num_query, length)
        parts = _divided(documents, dict(shares or SHARES), seed)
        num_windows = num_support, num_query
        super().__init__(
            drawn(sizes, lambda size, name: _draw(parts[name], size, num_windows, length, [seed, *name.encode()]))
        )


class _Document(NamedTuple):
    """A text that tasks are made of: its number among all, its domain's number, and its tokens."""

    number: int
    domain: int
    tokens: Tensor


def _documents(texts: Mapping[str, Sequence[Tensor]], num_windows: int, length: int) -> list[_Document]:
    """Return the documents that have the windows of a task."""
    found = [(domain, document) for domain, each in enumerate(texts.values()) for document in each]
    long_enough = [each for each in found if len(each[1]) >= num_windows * (length + 1)]
    return [_Document(number, *each) for number, each in enumerate(long_enough)]


def _divided(documents: Sequence[_Document], shares: dict[str, float], seed: int) -> dict[str, list[_Document]]:
    check_splits(shares, SPLITS)
    require(sum(shares.values()) > 0, "data.shares", shares, "numbers of which one is above 0")
    parts: dict[str, list[_Document]] = {name: [] for name in SPLITS}
    for domain in dict.fromkeys(document.domain for document in documents):
        own = [document for document in documents if document.domain == domain]
        order = np.random.default_rng([seed, domain]).permutation(len(own)).tolist()
        begin = 0
        for name, count in zip(shares, apportion(len(own), list(shares.values())), strict=True):
            parts[name] += [own[place] for place in order[begin : begin + count]]
            begin += count
    return parts


def _draw(
    documents: Sequence[_Document], num_tasks: int, num_windows: tuple[int, int], length: int, seed: list[int]
) -> InMemoryTensors:
    expected = f"a document for it with {sum(num_windows)} windows of {length + 1} bytes"
    require(bool(documents), "data.sizes", num_tasks, expected, "Lower data.length, or raise the split's data.shares.")
    generator = np.random.default_rng(seed)
    chosen = [documents[place] for place in generator.integers(len(documents), size=num_tasks)]
    windows = torch.stack([_drawn_windows(each.tokens, sum(num_windows), length, generator) for each in chosen])
    support, query = windows.to(torch.int64).split(num_windows, dim=1)
    return InMemoryTensors(
        {
            "support": {"input": support[..., :-1], "target": support[..., 1:]},
            "query": {"input": query[..., :-1], "target": query[..., 1:]},
            "document": torch.tensor([each.number for each in chosen]),
            "domain": torch.tensor([each.domain for each in chosen]),
        }
    )


def _drawn_windows(tokens: Tensor, count: int, length: int, generator: np.random.Generator) -> Tensor:
    """Return `count` windows (count, length + 1) of a document, none of which overlap."""
    places = generator.choice(len(tokens) // (length + 1), count, replace=False)
    return torch.stack([tokens[place * (length + 1) : (place + 1) * (length + 1)] for place in places.tolist()])
