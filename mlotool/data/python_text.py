"""Python's own documentation and sources, as text for language models and as few-shot tasks: no download."""

import ast
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from random import Random

import numpy as np
import torch
from torch import Tensor

from mlotool.core.arguments import require
from mlotool.core.settings import Count, NonNegative, Rounds, Seed, target
from mlotool.data import language_data
from mlotool.data.language_data import BYTES, as_tokens
from mlotool.data.splits import AbstractData, InMemoryTensors, Sizes, check_splits, drawn

_NAMES = """
_pydecimal _pyio abc argparse ast base64 bdb bisect calendar cmd code codecs codeop configparser contextlib copy csv
dataclasses difflib dis doctest enum filecmp fileinput fnmatch fractions ftplib functools getopt gettext glob graphlib
gzip hashlib heapq hmac imaplib inspect io ipaddress linecache lzma mailbox mimetypes netrc numbers opcode operator
optparse os pdb pickle pickletools pkgutil plistlib poplib posixpath pprint pstats pyclbr queue quopri random reprlib
runpy sched secrets selectors shelve shlex shutil smtplib socket socketserver ssl stat statistics stringprep struct
subprocess symtable tarfile tempfile textwrap threading timeit tokenize trace traceback tracemalloc types typing uuid
warnings wave weakref
"""
# Modules of one file each that distributions neither leave out nor put into a package of their own, as they do with
# tests, idlelib, tkinter and turtle. One that is not there is passed over; the hash tells.
MODULES = tuple(_NAMES.split())

Documents = Sequence[bytes]
# Its first and its last line, from 1, and its text without the indentation.
_Docstring = tuple[int, int, str]


@cache
def read_domain(name: str) -> Documents:
    """Return the documents of one domain of Python's own text, in an order that is always the same.

    Args:
        name: one of PYTHON_DOMAINS.

    Raises:
        ConfigError: this Python has no sources on the disk.
    """
    documents = PYTHON_DOMAINS[name]()
    expected = f"one whose text is in {_library()}, the standard library as .py files"
    require(any(documents), "data.domains", name, expected, "Use data=text_folder, or another Python.")
    return [document for document in documents if document]


def _documentation() -> Documents:
    """Return the topics of `help()`: the language reference. Some topics contain others; a paragraph counts once."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return []
    seen: set[str] = set()
    documents = []
    for name in sorted(topics):
        paragraphs = [paragraph for paragraph in topics[name].split("\n\n") if paragraph not in seen]
        seen.update(paragraphs)
        documents.append("\n\n".join(paragraphs).strip().encode())
    return documents


def _code() -> Documents:
    """Return the sources without the lines of their docstrings."""
    documents = []
    for source, docstrings in _sources():
        hidden = {line for first, last, _ in docstrings for line in range(first, last + 1)}
        kept = [line for number, line in enumerate(source.split("\n"), start=1) if number not in hidden]
        documents.append("\n".join(kept).encode())
    return documents


def _docstrings() -> Documents:
    return ["\n\n".join(text for _, _, text in docstrings).encode() for _, docstrings in _sources()]


def _tables() -> Documents:
    """Return the sources of the character sets, which are tables for the most part."""
    return [path.read_bytes() for path in sorted((_library() / "encodings").glob("*.py"))]


def _scrambled() -> Documents:
    """Return the docstrings with the letters of each line in a random order: as common as there, without words."""
    random = Random(0)
    return [b"\n".join(_shuffled(line, random) for line in document.split(b"\n")) for document in _docstrings()]


# What reads each domain of Python's own text.
PYTHON_DOMAINS: Mapping[str, Callable[[], Documents]] = {
    "documentation": _documentation,
    "code": _code,
    "docstrings": _docstrings,
    "tables": _tables,
    "scrambled": _scrambled,
}


def _library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


@cache
def _sources() -> Sequence[tuple[str, Sequence[_Docstring]]]:
    """Return the sources of MODULES, each with its docstrings."""
    paths = [_library() / f"{name}.py" for name in MODULES]
    sources = [path.read_text(encoding="utf-8") for path in paths if path.is_file()]
    return [(source, _docstrings_of(source)) for source in sources]


def _docstrings_of(source: str) -> Sequence[_Docstring]:
    docstrings = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                last = node.body[0].end_lineno
                assert last is not None
                docstrings.append((node.body[0].lineno, last, text))
    return docstrings


def _shuffled(line: bytes, random: Random) -> bytes:
    letters = list(line)
    random.shuffle(letters)
    return bytes(letters)


@target("data")
@dataclass(eq=False)
class PythonText(language_data.AbstractLanguageData):
    """Bytes of the text that comes with Python, in five domains.

    | domain | what | bytes in 3.11 |
    |---|---|---|
    | documentation | the language reference, which `help("topics")` lists; each paragraph once | 0.38 million |
    | docstrings | of about 100 modules of the standard library | 0.69 million |
    | code | the same modules without their docstrings | 2.5 million |
    | tables | the sources of the character sets, encodings/*.py | 1.4 million |
    | scrambled | the docstrings with the letters of each line in a random order | 0.69 million |

    The text depends on the version of Python; compare `sha256`. See `AbstractLanguageData` for how it is split.

    Args:
        sizes: number of windows by split name.
        domains: names of the domains to use; a window's `domain` is the position of its domain in this list.
        shares: by split name, the shares of the domains in it; see `AbstractLanguageData`.
        num_domains: must be the length of `domains`; models refer to it in the configuration. None: not checked.
        vocabulary_size: 256; models refer to it too.
        length: number of tokens that a model reads.
        seed: seed of the splits.
        sha256: first digits of the SHA-256 of the text that results were measured on; None: any text.

    Raises:
        ConfigError: the options do not fit the text, or this Python has no sources on the disk.

    Example:
        >>> data = PythonText({"train": 100, "test": 20}, ["documentation"], length=32)
        >>> data.split("train").__getitems__([0, 1])["input"].shape
        torch.Size([2, 32])
    """

    domains: Sequence[str] = ("documentation",)

    def __post_init__(self) -> None:
        language_data.check_vocabulary(self.vocabulary_size)
        language_data.check_domains(self.domains, tuple(PYTHON_DOMAINS))
        self._split({name: as_tokens(language_data.joined(read_domain(name))) for name in self.domains})


# s: windows of a part of a task, t: length of a window

SPLITS = ("train", "val", "test")
SHARES = {"train": 0.7, "val": 0.1, "test": 0.2}


# Its number among all, its domain's number, and its tokens.
_Document = tuple[int, int, Tensor]


@target("data")
@dataclass(eq=False)
class PythonEpisodes(AbstractData[InMemoryTensors]):
    """Few-shot tasks from Python's own text: a task consists of windows of one document.

    A sample is a task, `{"support": {"input": (s, t) int64, "target": (s, t) int64}, "query": .., "document": ..,
    "domain": ..}`; the last two are the numbers of its document and domain. A batch has the tasks along its first axis.
    A document is, for example, the source of a module or a topic of the language reference; see `PythonText`. No
    document is in the tasks of two splits, and no window is in both parts of a task.

    Args:
        sizes: number of tasks by split name; the splits are `train`, `val` and `test`.
        domains: names of the domains of `PythonText` that the documents come from.
        shares: by split name, the share of each domain's documents that the split gets. None: train 0.7, val 0.1, test
            0.2.
        num_support: s, windows in the support part of a task, from which the task is learned.
        num_query: windows in the query part, on which the result is evaluated.
        vocabulary_size: 256; models refer to it in the configuration.
        length: t, number of tokens that a model reads.
        seed: seed of the division of documents and of the tasks; a split's tasks do not depend on the sizes of other
            splits.
        sha256: first digits of the SHA-256 of the text that results were measured on; None: any text.

    Attributes:
        sha256: the SHA-256 of the text, in hexadecimal digits.

    Raises:
        ConfigError: the options do not fit the text, or this Python has no sources on the disk.

    Example:
        >>> data = PythonEpisodes({"train": 20}, ["documentation"], num_support=2, num_query=2, length=32)
        >>> data.split("train").__getitems__([0, 1, 2])["support"]["input"].shape
        torch.Size([3, 2, 32])
    """

    sizes: Sizes
    domains: Sequence[str] = ("documentation", "code", "tables")
    shares: Mapping[str, NonNegative] | None = None
    num_support: Rounds = 4
    num_query: Rounds = 4
    vocabulary_size: Count = BYTES
    length: Rounds = 64
    seed: Seed = 0
    sha256: str | None = None

    def __post_init__(self) -> None:
        language_data.check_vocabulary(self.vocabulary_size)
        check_splits(self.sizes, SPLITS)
        language_data.check_domains(self.domains, tuple(PYTHON_DOMAINS))
        self.num_classes = BYTES
        texts = {name: [as_tokens(document) for document in read_domain(name)] for name in self.domains}
        whole = {name: torch.cat(documents) for name, documents in texts.items()}
        self.sha256 = language_data.checked_hash(whole, self.sha256)
        parts = self._divided(list(texts.values()))
        super().__init__(drawn(self.sizes, lambda size, name: self._draw(parts[name], size, name)))

    def _divided(self, texts: Sequence[Sequence[Tensor]]) -> dict[str, list[_Document]]:
        """Return by split, of the documents by domain, those that have the windows of a task."""
        shares = dict(self.shares or SHARES)
        check_splits(shares, SPLITS)
        require(sum(shares.values()) > 0, "data.shares", shares, "numbers of which one is above 0")
        parts: dict[str, list[_Document]] = {name: [] for name in SPLITS}
        numbers, num_tokens = count(), (self.num_support + self.num_query) * (self.length + 1)
        for domain, documents in enumerate(texts):
            long_enough = [(next(numbers), domain, document) for document in documents if len(document) >= num_tokens]
            order = np.random.default_rng([self.seed, domain]).permutation(len(long_enough))
            ends = np.cumsum(language_data.apportion(len(order), list(shares.values())))
            for name, places in zip(shares, np.split(order, ends[:-1]), strict=True):
                parts[name] += [long_enough[place] for place in places]
        return parts

    def _draw(self, documents: Sequence[_Document], num_tasks: int, split: str) -> InMemoryTensors:
        """Draw documents, and windows of each, none of which overlap."""
        size, num_windows = self.length + 1, self.num_support + self.num_query
        expected = f"a document for it with {num_windows} windows of {size} bytes"
        advice = "Lower data.length, or raise the split's data.shares."
        require(bool(documents), "data.sizes", num_tasks, expected, advice)
        generator = np.random.default_rng([self.seed, *split.encode()])
        chosen = [documents[place] for place in generator.integers(len(documents), size=num_tasks)]
        tasks = []
        for _, _, tokens in chosen:
            places = generator.choice(len(tokens) // size, num_windows, replace=False).tolist()
            tasks.append(torch.stack([tokens[place * size : (place + 1) * size] for place in places]))
        windows = torch.stack(tasks).to(torch.int64)
        parts = {"support": windows[:, : self.num_support], "query": windows[:, self.num_support :]}
        numbers, domains = (torch.tensor([document[position] for document in chosen]) for position in (0, 1))
        tensors = {name: {"input": part[..., :-1], "target": part[..., 1:]} for name, part in parts.items()}
        return InMemoryTensors({**tensors, "document": numbers, "domain": domains})
