"""Text for language models: windows of bytes by domain, in splits that share nothing."""

import hashlib
import sys
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from mlotool.core.errors import ConfigError
from mlotool.data import PythonText, TextFolder, TextWindows
from mlotool.data.language_data import apportion
from mlotool.data.python_text import PYTHON_DOMAINS, read_domain

LENGTH = 7


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two domains: each token of `low` is below 100, each of `high` is not; no two places have the same four bytes."""
    for name, first, last in (("high", 100, 250), ("low", 1, 99)):
        (tmp_path / name / "deep").mkdir(parents=True)
        span = last - first
        for number in range(2):
            text = bytes(first + place // span**k % span for place in range(400) for k in (2 * number, 2 * number + 1))
            (tmp_path / name / ("deep" if number else "") / f"{number}.txt").write_bytes(text)
    (tmp_path / "low" / "notes.md").write_text("left out")
    return tmp_path


def places(dataset: TextWindows) -> set[int]:
    """Return the tokens' places that a split covers, targets included."""
    length = dataset[0]["input"].numel()
    found = (dataset.starts[:, None] + torch.arange(length + 1)).flatten().tolist()
    assert len(set(found)) == len(found), "two windows overlap"
    return set(found)


def whole(dataset: TextWindows) -> dict[str, Tensor]:
    return dataset.__getitems__(range(len(dataset)))


@pytest.mark.parametrize("seed", range(2))
def test_no_token_is_in_two_splits(folder: Path, seed: int) -> None:
    sizes = {"train": 90, "meta": 20, "val": 30, "test": 50}
    data = TextFolder(str(folder), sizes, length=LENGTH, seed=seed, shares={"test": {"low": 1}, "meta": {"high": 2}})
    assert (data.splits, data.domains) == (tuple(sizes), ("high", "low"))
    assert {name: len(data.split(name)) for name in sizes} == sizes
    for one, other in combinations(sizes, 2):
        assert not places(data.split(one)) & places(data.split(other)), (one, other)


def test_a_split_is_a_stretch_of_each_domain(folder: Path) -> None:
    data = TextFolder(str(folder), {"train": 60, "test": 40}, length=LENGTH, seed=3)
    for name in data.splits:
        split = data.split(name)
        for domain in range(2):
            steps = split.starts[split.domain == domain].diff()
            # One step back at most, where the ring is closed.
            assert sum(step != LENGTH + 1 for step in steps.tolist()) <= 1


def test_a_batch(folder: Path) -> None:
    data = TextFolder(str(folder), {"train": 20, "val": 6}, length=LENGTH, shares={"train": {"low": 3, "high": 1}})
    batch = data.split("train").__getitems__(torch.tensor([19, 0, 4]))
    assert {name: tuple(values.shape) for name, values in batch.items()} == {
        "input": (3, LENGTH),
        "target": (3, LENGTH),
        "domain": (3,),
        "index": (3,),
    }
    assert all(values.dtype == torch.int64 for values in batch.values())
    assert torch.equal(batch["input"][:, 1:], batch["target"][:, :-1])
    assert batch["index"].tolist() == [19, 0, 4]
    sample = data.split("train")[4]
    assert all(torch.equal(values[2], sample[name]) for name, values in batch.items())
    everything = whole(data.split("train"))
    assert torch.bincount(everything["domain"]).tolist() == [5, 15]
    letters = everything["input"].masked_fill(everything["input"] == 0, 1)
    assert bool(((letters >= 100) | (everything["input"] == 0))[everything["domain"] == 0].all())
    assert bool((letters < 100)[everything["domain"] == 1].all())


def test_the_text_is_that_of_the_files(folder: Path) -> None:
    data = TextFolder(str(folder), {"train": 180}, length=LENGTH, domains=["low"])
    whole_text = (folder / "low/0.txt").read_bytes() + b"\0" + (folder / "low/deep/1.txt").read_bytes() + b"\0"
    batch = whole(data.split("train"))
    windows = torch.cat([batch["input"], batch["target"][:, -1:]], dim=1)
    by_place = windows[data.split("train").starts.argsort()]
    assert bytes(by_place.flatten().tolist()) == whole_text[: 180 * (LENGTH + 1)]


def test_the_hash_is_of_the_text(folder: Path) -> None:
    data = TextFolder(str(folder / "low/0.txt"), {"train": 5}, length=LENGTH)
    text = (folder / "low/0.txt").read_bytes()
    assert data.domains == ("0",)
    assert data.sha256 == hashlib.sha256(b"0\0" + text + b"\0\0").hexdigest()
    TextFolder(str(folder / "low/0.txt"), {"train": 5}, length=LENGTH, sha256=data.sha256[:12])
    with pytest.warns(UserWarning, match=rf"the text has {data.sha256[:12]}, not 0123, .* ~data\.sha256"):
        TextFolder(str(folder / "low/0.txt"), {"train": 5}, length=LENGTH, sha256="0123")


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("none", {}, r"data\.path: found .*none'; expected a text file that exists"),
        ("", {"pattern": "*.rst"}, r"data\.path: .*expected text in it, in files that match data\.pattern=\*\.rst"),
        ("", {"pattern": "/etc/*"}, r"data\.pattern='/etc/\*'"),
        ("", {"domains": ["lo"]}, r"data\.domains: found 'lo'; expected some of high, low\. Did you mean 'low'\?"),
        ("", {"domains": ["low", "low"]}, r"expected at least one domain, each once"),
        ("", {"num_domains": 3}, r"data\.num_domains=3; expected 2, as there are high, low"),
        ("", {"shares": {"test": {"low": 1}}}, r"data\.shares: found 'test'; expected some of train"),
        ("", {"shares": {"train": {"lo": 1}}}, r"data\.shares\.train: found 'lo'; .*mean 'low'.* ~data\.shares"),
        ("", {"shares": {"train": {"low": 0}}}, r"data\.shares\.train: .*; expected a share above 0"),
        ("", {"sizes": {"train": 1000}}, r"data\.sizes: windows of 'high': found 500; expected at most"),
    ],
)
def test_what_does_not_fit_is_refused(folder: Path, path: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TextFolder(str(folder / path), **({"sizes": {"train": 4}, "length": LENGTH} | options))


def test_a_tokenizer_in_place_of_bytes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Tokenizer:
        eos_token_id = 999

        @classmethod
        def from_pretrained(cls, path: str, **settings: Any) -> "Tokenizer":
            assert settings == {"local_files_only": True, "trust_remote_code": False}
            return cls()

        def __len__(self) -> int:
            return 1000

        def __call__(self, text: str, *, add_special_tokens: bool, verbose: bool) -> dict[str, Any]:
            assert not add_special_tokens
            assert not verbose
            return {"input_ids": [500 + len(text)] * 20}

    package = ModuleType("transformers")
    package.AutoTokenizer = Tokenizer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", package)
    options: dict[str, Any] = {"length": 20, "domains": ["low"], "tokenizer": str(folder)}
    data = TextFolder(str(folder), {"train": 2}, vocabulary_size=1024, **options)
    batch = whole(data.split("train"))
    assert (data.vocabulary_size, data.num_classes) == (1024, 1024)
    assert batch["input"].dtype == torch.int64
    assert set(batch["input"].flatten().tolist()) == {500 + 800}
    assert batch["target"][:, -1].tolist() == [999, 999]
    with pytest.raises(ConfigError, match=r"data\.vocabulary_size: found 256; expected at least 1000, the tokens of"):
        TextFolder(str(folder), {"train": 2}, **options)


def test_pythons_own_text() -> None:
    domains = list(PYTHON_DOMAINS)
    sizes = {"train": 300, "meta": 20, "val": 20, "test": 30}
    data = PythonText(sizes, domains, {"meta": {"documentation": 1}}, num_domains=len(domains), length=32)
    assert data.domains == tuple(domains)
    assert torch.bincount(data.split("train").domain).tolist() == [60] * 5
    assert set(data.split("meta").domain.tolist()) == {domains.index("documentation")}
    text = bytes(whole(data.split("meta"))["input"].flatten().tolist()).decode(errors="replace")
    assert sum(letter.isalpha() or letter.isspace() for letter in text) > 0.7 * len(text)


def test_the_domains_are_what_they_say() -> None:
    found = {name: b"\n".join(read_domain(name)).decode("latin-1") for name in PYTHON_DOMAINS}
    assert min(len(text) for text in found.values()) > 300_000
    # of textwrap
    assert "Collapse and truncate the given text to fit in the given width." in found["docstrings"]
    assert "Collapse and truncate the given text to fit in the given width." not in found["code"]
    assert "def shorten(text, width, **kwargs):" in found["code"]
    assert "decoding_table" in found["tables"]
    assert sorted(found["scrambled"]) == sorted(found["docstrings"])
    assert "argument" in found["docstrings"]
    assert found["scrambled"].count("argument") < 0.01 * found["docstrings"].count("argument")
    paragraphs = [each for document in read_domain("documentation") for each in document.strip().split(b"\n\n")]
    assert len(set(paragraphs)) > 0.98 * len(paragraphs)


@pytest.mark.parametrize("seed", range(5))
def test_shares_are_divided_to_the_last_window(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    size = int(torch.randint(1000, (), generator=generator))
    shares = torch.rand(6, generator=generator).tolist()
    counts = apportion(size, shares)
    assert sum(counts) == size
    assert all(abs(count - size * share / sum(shares)) < 1 for count, share in zip(counts, shares, strict=True))
