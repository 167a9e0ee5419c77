"""Texts with labels, and texts for language models: windows of tokens by domain, in splits that share nothing."""

import hashlib
import json
import re
import sys
from itertools import combinations, product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from mlotool.core.errors import ConfigError
from mlotool.data import (
    SST,
    PythonText,
    TextFolder,
    TextWindows,
    Vocabulary,
    Wrench,
    hard_labels,
    label_model,
    majority_vote,
)
from mlotool.data.language_data import apportion
from mlotool.data.python_text import PYTHON_DOMAINS, read_domain
from mlotool.data.text_data import LocalTokenizer, split_words


@pytest.fixture
def wrench(tmp_path: Path) -> Path:
    """Two classes; the first of three labelers is right, the second always votes for 1, the third never votes."""
    for name, num_texts in (("train", 12), ("valid", 8), ("test", 6)):
        samples = {
            str(i): {
                "label": i % 2,
                "weak_labels": [-1 if i >= 10 else i % 2, -1 if i >= 10 else 1, -1],
                "data": {"text": f"{'good' if i % 2 else 'bad'} number{i} {name}"},
            }
            # JSON keeps the order of the keys, which need not be that of the numbers.
            for i in reversed(range(num_texts))
        }
        (tmp_path / f"{name}.json").write_text(json.dumps(samples))
    (tmp_path / "label.json").write_text(json.dumps({"0": "negative", "1": "positive"}))
    return tmp_path


SIZES = {"train": 12, "meta": 4, "val": 4, "test": 6}


def words(data: Wrench | SST, split: str, index: int) -> list[str]:
    ids = data.split(split)[index]["input"]
    return [data.encoder.words[i] for i in ids.tolist() if i != 0]


@pytest.mark.parametrize("labels", ["majority_vote", "label_model", "clean"])
def test_wrench(wrench: Path, labels: str) -> None:
    data = Wrench(str(wrench), SIZES, 2, vocabulary_size=40, length=5, labels=labels)
    assert (data.num_classes, data.vocabulary_size, data.length) == (2, 40, 5)
    num_covered = 12 if labels == "clean" else 10
    assert {name: len(data.split(name)) for name in data.splits} == SIZES | {"train": num_covered}
    batch = data.split("test").__getitems__([0, 1, 2])
    shapes = {name: tuple(values.shape) for name, values in batch.items()}
    assert shapes == {"input": (3, 5), "target": (3,), "index": (3,)}
    assert all(values.dtype == torch.int64 for values in batch.values())
    for i in range(num_covered):
        sample = data.split("train")[i]
        true = int("good" in words(data, "train", i))
        assert sample.get("clean_target", sample["target"]) == true
        if labels != "clean" and true == 1:
            assert sample["target"] == 1  # both vote for it
            assert sample["weak_labels"].tolist() == [1, 1, -1]
    assert all(data.split("val")[i]["target"] == int("good" in words(data, "val", i)) for i in range(4))


def test_meta_and_val_are_disjoint_and_words_are_those_of_train(wrench: Path) -> None:
    data = Wrench(str(wrench), SIZES, 2, vocabulary_size=40, length=5)
    valid = Wrench(str(wrench), {"val": 8}, 2, vocabulary_size=40, length=5)
    assert "valid" not in data.encoder.words
    found = {tuple(words(data, split, i)) for split in ("meta", "val") for i in range(4)}
    assert len(found) == 8
    assert "valid" in valid.encoder.words  # without train, the words of what there is


@pytest.mark.parametrize("make", [lambda root: Wrench(root, SIZES, 2), lambda root: SST(root, SIZES)])
def test_absent_files_are_named(tmp_path: Path, make: type) -> None:
    with pytest.raises(ConfigError, match=r"data\.root=.*absent.*expected .*Download .*https://.*set data\.root"):
        make(str(tmp_path / "absent"))


def test_votes_are_needed_for_labels_of_votes(wrench: Path) -> None:
    samples = json.loads((wrench / "train.json").read_text())
    for sample in samples.values():
        sample["weak_labels"] = [-1, -1, -1]
    (wrench / "train.json").write_text(json.dumps(samples))
    with pytest.raises(ConfigError, match=r"data\.labels: found 'label_model'; expected clean"):
        Wrench(str(wrench), SIZES, 2)


def test_sst2_of_glue(tmp_path: Path) -> None:
    for name, num_rows in (("train", 20), ("dev", 6)):
        rows = [f'{"good" if i % 2 else "bad"} "film \t{i % 2}' for i in range(num_rows)]
        (tmp_path / f"{name}.tsv").write_text("\n".join(["sentence\tlabel", *rows]) + "\n")
    sizes = {"train": 12, "meta": 4, "val": 4, "test": 6}
    data = SST(str(tmp_path), sizes, length=4)
    assert {name: len(data.split(name)) for name in data.splits} == sizes
    for name in data.splits:
        for i in range(sizes[name]):
            assert words(data, name, i) == ["good" if data.split(name)[i]["target"] else "bad", '"', "film"]
    tail = SST(str(tmp_path), sizes, imbalance_factor=3)
    assert torch.bincount(tail.split("train").values["target"]).tolist() == [6, 2]
    assert torch.bincount(tail.split("val").values["target"]).tolist() == [2, 2]


TREES = [
    "(3 (2 It) (4 (2 's) (3 (2 a) (3 (3 good) (2 -LRB-)))))",
    "(0 (2 So) (1 bad))",
    "(2 (2 A) (2 film))",
    "(4 great)",
    "(1 (2 not) (3 good))",
]


@pytest.mark.parametrize(("num_classes", "num_sentences"), [(5, 10), (2, 8)])
def test_sst_trees(tmp_path: Path, num_classes: int, num_sentences: int) -> None:
    for name in ("train", "dev", "test"):
        (tmp_path / f"{name}.txt").write_text("\n".join(TREES * 2) + "\n")
    sizes = {"train": num_sentences - 2, "meta": 2, "val": num_sentences, "test": num_sentences}
    data = SST(str(tmp_path), sizes, num_classes=num_classes, length=9)
    assert {name: len(data.split(name)) for name in data.splits} == sizes
    found = {" ".join(words(data, "val", i)): int(data.split("val")[i]["target"]) for i in range(num_sentences)}
    five = {"it ' s a good": 3, "so bad": 0, "a film": 2, "great": 4, "not good": 1}
    expected = five if num_classes == 5 else {text: int(label > 2) for text, label in five.items() if label != 2}
    assert {text.replace(" - lrb -", "").replace("'s", "' s"): label for text, label in found.items()} == expected


def test_words_are_lower_case_and_signs_are_words() -> None:
    expected = "it's good , isn't it ? très - bon"
    assert split_words("It's GOOD, isn't it?\n Très-bon") == expected.split()


def test_the_commonest_words_get_ids_in_an_order_of_their_own() -> None:
    vocabulary = Vocabulary.of(["b b a c", "c d"], max_size=5)
    assert vocabulary.words == ("<padding>", "<unknown>", "b", "c", "a")
    assert Vocabulary.of(["c d", "c a b b"], max_size=5).words == vocabulary.words
    assert len(vocabulary) == 5
    # Texts are cut and padded.
    assert vocabulary.encode(["b c b c", "C", "b nothing"], 3).tolist() == [[2, 3, 2], [3, 0, 0], [2, 1, 0]]


def install_fake(monkeypatch: pytest.MonkeyPatch, num_tokens: int, padding: int = 0) -> dict[str, Any]:
    """Put a transformers package in place whose tokenizer writes down how it was loaded and called."""
    seen: dict[str, Any] = {}

    class Tokenizer:
        pad_token_id, eos_token_id = padding, 999

        @classmethod
        def from_pretrained(cls, path: str, **settings: Any) -> "Tokenizer":
            if path.endswith("torn"):
                raise OSError("it is torn\nlong advice")
            seen["loaded"] = settings
            return cls()

        def __len__(self) -> int:
            return num_tokens

        def __call__(self, texts: list[str] | str, **settings: Any) -> dict[str, Any]:
            seen["called"] = settings
            if isinstance(texts, str):
                return {"input_ids": [500 + len(texts)] * 20}
            return {"input_ids": [[7] * settings["max_length"] for _ in texts]}

    package = ModuleType("transformers")
    package.AutoTokenizer = Tokenizer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", package)
    return seen


def test_a_tokenizer_comes_from_the_disk_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = install_fake(monkeypatch, 30)
    tokenizer = LocalTokenizer(str(tmp_path), 30)
    assert seen == {"loaded": {"local_files_only": True, "trust_remote_code": False}}
    assert tokenizer.encode(["a", "b"], 3).tolist() == [[7] * 3] * 2
    (tmp_path / "torn").mkdir()
    for name, size, words in (
        ("absent", 30, r"data\.tokenizer: found '.*absent', which is not a folder; expected one"),
        ("torn", 30, r"no tokenizer could be read \(it is torn\); expected a folder"),
        ("", 29, r"data\.vocabulary_size: found 29; expected at least 30, the tokens of data\.tokenizer="),
    ):
        with pytest.raises(ConfigError, match=words):
            LocalTokenizer(str(tmp_path / name), size)
    install_fake(monkeypatch, 30, padding=1)
    with pytest.raises(ConfigError, match=r"expected one whose padding has the id 0.*the id 1"):
        LocalTokenizer(str(tmp_path), 30)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"not installed; expected it.*pip install 'mlotool\[text\]'"):
        LocalTokenizer(str(tmp_path), 30)


def plant(accuracy: list[float], coverage: float, num_samples: int, num_classes: int) -> tuple[Tensor, Tensor]:
    """Return votes (n, m) of labelers with these accuracies, and the labels."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(num_classes, (num_samples,), generator=generator)
    shape = (num_samples, len(accuracy))
    is_right = torch.rand(shape, generator=generator) < torch.tensor(accuracy)
    wrong = (target[:, None] + torch.randint(1, num_classes, shape, generator=generator)) % num_classes
    votes = torch.where(is_right, target[:, None], wrong)
    return torch.where(torch.rand(shape, generator=generator) < coverage, votes, -1), target


def test_majority_vote_counts() -> None:
    votes = torch.tensor([[2, 2, 0], [0, 1, -1], [-1, -1, -1], [-1, 1, -1], [0, 1, 2]])
    third = [1 / 3] * 3
    expected = [[0, 0, 1], [0.5, 0.5, 0], third, [0, 1, 0], third]
    torch.testing.assert_close(majority_vote(votes, 3), torch.tensor(expected, dtype=torch.float64))
    # Another value may mean no vote.
    votes = torch.tensor([[1, 9], [9, 9]])
    assert majority_vote(votes, 2, abstain=9).tolist() == [[0, 1], [0.5, 0.5]]
    assert label_model(votes, 2, abstain=9).probabilities[1].tolist() == [0.5, 0.5]


@pytest.mark.parametrize("vote", [majority_vote, label_model])
def test_votes_for_no_class_are_refused(vote: type) -> None:
    with pytest.raises(ConfigError, match=r"Weak labels go from -1 to 2; expected classes from 0 to 1"):
        vote(torch.tensor([[2, -1]]), 2)


def test_hard_labels_break_ties_by_the_seed() -> None:
    probabilities = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.1, 0.7]]).repeat(2000, 1)
    labels = hard_labels(probabilities, seed=0)
    assert (labels[1::2] == 2).all()
    assert labels[::2].float().mean() == pytest.approx(0.5, abs=0.05)
    assert set(labels[::2].tolist()) == {0, 1}
    assert torch.equal(labels, hard_labels(probabilities, seed=0))
    assert not torch.equal(labels, hard_labels(probabilities, seed=1))


def joint(row: list[int], label: int, accuracy: Tensor, num_classes: int) -> Tensor:
    """Return p(votes that are given | label), by its definition."""
    factors = [
        a if vote == label else (1 - a) / (num_classes - 1) for vote, a in zip(row, accuracy, strict=True) if vote >= 0
    ]
    return torch.stack(factors).prod()


@pytest.mark.parametrize("num_classes", [2, 3])
def test_the_label_model_is_at_its_fixed_point(num_classes: int) -> None:
    votes, _ = plant([0.9, 0.7, 0.6], 0.7, 60, num_classes)
    balance = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)[:num_classes]
    model = label_model(
        votes, num_classes, class_balance=balance, prior_votes=5.0, max_iterations=5000, tolerance=1e-12
    )
    covered = (votes >= 0).any(dim=1)
    found = model.probabilities[covered]
    balance = balance / balance.sum()
    # The mean is the balance; what remains of each row is the likelihood, up to one weight a class.
    torch.testing.assert_close(found.mean(dim=0), balance, atol=1e-9, rtol=0)
    likelihood = [
        [joint(row, c, model.accuracy, num_classes) for c in range(num_classes)] for row in votes[covered].tolist()
    ]
    ratio = found / torch.tensor(likelihood)
    ratio = ratio / ratio[:, :1]
    torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio))
    assert torch.equal(model.probabilities[~covered], balance.expand(int((~covered).sum()), -1))
    for labeler in range(3):
        does_vote = votes[:, labeler] >= 0
        right = model.probabilities[does_vote, votes[does_vote, labeler]].sum()
        expected = (right + 0.7 * 5) / (does_vote.sum() + 5)
        torch.testing.assert_close(model.accuracy[labeler], expected)


def test_without_a_prior_it_is_maximum_likelihood() -> None:
    # Each row has its mirror image, so the classes are equally common whatever the accuracies are.
    rows = [
        row
        for row, count in zip(product([0, 1], repeat=3), [9, 3, 3, 2, 2, 3, 3, 9], strict=True)
        for _ in range(count)
    ]
    votes = torch.tensor(rows)
    model = label_model(votes, 2, prior_votes=0.0, max_iterations=10000, tolerance=1e-13)
    accuracy = model.accuracy.clone().requires_grad_()
    likelihood = sum((0.5 * (joint(row, 0, accuracy, 2) + joint(row, 1, accuracy, 2))).log() for row in votes.tolist())
    (gradient,) = torch.autograd.grad(likelihood, accuracy)
    torch.testing.assert_close(gradient, torch.zeros(3, dtype=torch.float64), atol=1e-5, rtol=0)
    # In closed form, of three labelers: E[l_1 l_2] = (2 a_1 - 1)(2 a_2 - 1), and so on.
    signs = 2.0 * votes.double() - 1
    m12, m13, m23 = ((signs[:, i] * signs[:, j]).mean() for i, j in ((0, 1), (0, 2), (1, 2)))
    expected = 0.5 + 0.5 * torch.stack([(m12 * m13 / m23).sqrt(), (m12 * m23 / m13).sqrt(), (m13 * m23 / m12).sqrt()])
    torch.testing.assert_close(model.accuracy, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("num_classes", [2, 4])
def test_planted_accuracies_are_recovered(num_classes: int) -> None:
    planted = [0.95, 0.8, 0.7, 0.6, 0.6]
    votes, target = plant(planted, 0.8, 4000, num_classes)
    model = label_model(votes, num_classes)
    torch.testing.assert_close(model.accuracy, torch.tensor(planted).double(), atol=0.04, rtol=0)
    by_model = (hard_labels(model.probabilities, 0) == target).float().mean()
    by_majority = (hard_labels(majority_vote(votes, num_classes), 0) == target).float().mean()
    assert by_model > by_majority + 0.02
    # One that never votes changes nothing.
    few = votes[:400]
    silent = torch.cat([few, torch.full((400, 1), -1)], dim=1)
    expected = label_model(few, num_classes).probabilities
    torch.testing.assert_close(label_model(silent, num_classes).probabilities, expected)


def test_rules_for_one_class_each_do_not_all_become_right_or_wrong() -> None:
    votes, target = plant([0.9, 0.8, 0.9, 0.8], 0.7, 4000, 2)
    votes = torch.where(votes == torch.arange(4) % 2, votes, -1)
    model = label_model(votes, 2)
    assert model.accuracy.min() > 0.6
    covered = (votes >= 0).any(dim=1)
    assert (hard_labels(model.probabilities, 0) == target)[covered].float().mean() > 0.8


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
    for split in map(data.split, sizes):
        for domain in range(2):
            steps = split.starts[split.domain == domain].diff()
            # A stretch: one step back at most, where the ring is closed.
            assert sum(step != LENGTH + 1 for step in steps.tolist()) <= 1


def test_the_seed_decides_where_splits_lie(folder: Path) -> None:
    def first(seed: int, **sizes: int) -> Tensor:
        return whole(TextFolder(str(folder), sizes, length=LENGTH, seed=seed).split("test"))["input"]

    assert torch.equal(first(0, train=20, test=10), first(0, train=150, test=10))
    assert not torch.equal(first(0, test=10), first(1, test=10))


def test_a_batch(folder: Path) -> None:
    data = TextFolder(str(folder), {"train": 20, "val": 6}, length=LENGTH, shares={"train": {"low": 3, "high": 1}})
    batch = data.split("train").__getitems__(torch.tensor([19, 0, 4]))
    shapes = {name: tuple(values.shape) for name, values in batch.items()}
    assert shapes == {"input": (3, LENGTH), "target": (3, LENGTH), "domain": (3,), "index": (3,)}
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
    with pytest.warns(UserWarning, match=rf"the text has the hash {data.sha256[:12]}, not 0123, .* ~data\.sha256"):
        TextFolder(str(folder / "low/0.txt"), {"train": 5}, length=LENGTH, sha256="0123")


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("none", {}, r"data\.path: found .*none'; expected a text file that exists"),
        ("", {"pattern": "*.rst"}, r"data\.path: .*expected text in it, in files that match data\.pattern=\*\.rst"),
        ("", {"pattern": "/etc/*"}, r"data\.pattern='/etc/\*'"),
        ("", {"domains": ["lo"]}, r"data\.domains: found 'lo'; expected some of high, low\. Did you mean 'low'\?"),
        ("", {"num_domains": 3}, r"data\.num_domains=3; expected 2, as there are high, low"),
        ("", {"shares": {"test": {"low": 1}}}, r"data\.shares: found 'test'; expected some of train"),
        ("", {"shares": {"train": {"lo": 1}}}, r"data\.shares\.train: found 'lo'; .*mean 'low'.* ~data\.shares"),
    ],
)
def test_what_does_not_fit_is_refused(folder: Path, path: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TextFolder(str(folder / path), **({"sizes": {"train": 4}, "length": LENGTH} | options))


def test_sizes_that_are_too_large_are_told_for_all_domains_at_once_with_some_that_fit(folder: Path) -> None:
    options: dict[str, Any] = {"length": LENGTH, "shares": {"train": {"high": 1, "low": 2}}}
    with pytest.raises(
        ConfigError, match=r"found 340 of 'high' and 674 of 'low', in windows .* as the texts"
    ) as caught:
        TextFolder(str(folder), {"train": 1000, "val": 14}, **options)
    [sizes] = re.findall(r"Set data\.sizes='\{train: (\d+), val: (\d+)\}'", str(caught.value))
    train, val = map(int, sizes)
    data = TextFolder(str(folder), {"train": train, "val": val}, **options)
    assert len(data.split("train")) == train > 1
    with pytest.raises(ConfigError, match=r"data\.sizes"):
        TextFolder(str(folder), {"train": train + 3, "val": val}, **options)


def test_a_tokenizer_in_place_of_bytes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = install_fake(monkeypatch, 1000)
    options: dict[str, Any] = {"length": 20, "domains": ["low"], "tokenizer": str(folder)}
    data = TextFolder(str(folder), {"train": 2}, vocabulary_size=1024, **options)
    batch = whole(data.split("train"))
    assert seen["loaded"] == {"local_files_only": True, "trust_remote_code": False}
    assert seen["called"] == {"add_special_tokens": False, "verbose": False}
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
