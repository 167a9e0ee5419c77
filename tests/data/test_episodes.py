"""Data that are made without files, tasks and points and reviews, and what is refused of any data."""

from math import exp
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from mlotool.core.errors import ConfigError
from mlotool.data import (
    Digits,
    DigitsEpisodes,
    InMemoryTensors,
    Peaks,
    PythonEpisodes,
    SinusoidEpisodes,
    SyntheticClassification,
    SyntheticSpectra,
    SyntheticText,
    TwoDomains,
)
from mlotool.data.points import HIGHEST, LOWEST, level, peaks
from mlotool.data.python_text import read_domain
from mlotool.data.text_data import split_words
from mlotool.data.text_sets import ADJECTIVES, NEGATIVE, POSITIVE, RULES, make_corpus


@pytest.mark.parametrize("make", [SinusoidEpisodes, DigitsEpisodes])
def test_the_seed_and_the_split_decide_the_tasks(make: type) -> None:
    def first(split: str, **settings: object) -> torch.Tensor:
        return make(**({"sizes": {"train": 10, "val": 5}} | settings)).split(split)[0]["support"]["input"]

    assert torch.equal(first("val"), first("val", sizes={"train": 20, "val": 5}))
    assert not torch.equal(first("val"), first("val", seed=1))
    assert not torch.equal(first("val"), first("train"))


def test_sinusoids_are_what_they_say() -> None:
    data = SinusoidEpisodes({"train": 500, "val": 20, "none": 0})
    assert data.splits == ("train", "val")
    batch = data.split("train").__getitems__(range(500))
    assert batch["support"]["input"].shape == (500, data.num_support, 1)
    assert batch["index"].tolist() == list(range(500))
    for part in ("support", "query"):
        x, y = batch[part]["input"], batch[part]["target"]
        assert x.dtype == y.dtype == torch.float32
        expected = batch["amplitude"][:, None, None] * torch.sin(x - batch["phase"][:, None, None])
        torch.testing.assert_close(y, expected, atol=1e-5, rtol=0)
        assert x.abs().max() <= 5
    assert 0.1 <= batch["amplitude"].min() < 0.3
    assert 4.8 < batch["amplitude"].max() <= 5
    assert 0 <= batch["phase"].min() <= batch["phase"].max() <= torch.pi


@pytest.mark.parametrize("turn", [False, True])
def test_digit_tasks(turn: bool) -> None:
    classes = {"train": [0, 1, 2, 3], "val": [4, 5, 6], "test": [7, 8, 9]}
    data = DigitsEpisodes(
        {"train": 40, "val": 10, "test": 10}, 3, num_support=5, num_query=4, classes=classes, turn=turn
    )
    known = {}
    for image, digit in zip(load_digits().images, load_digits().target, strict=True):
        known[tuple(image.flatten().tolist())] = int(digit)
        if turn:
            known[tuple(torch.from_numpy(image).rot90(1).flatten().tolist())] = int(digit) + 10
    for name, digits in classes.items():
        for task in range(10):
            sample = data.split(name)[task]
            allowed = [*digits, *(digit + 10 for digit in digits)] if turn else digits
            assert len(set(sample["classes"].tolist())) == 3
            assert set(sample["classes"].tolist()) <= set(allowed)
            seen = set()
            for part, shots in (("support", 5), ("query", 4)):
                assert sample[part]["input"].shape == (3 * shots, 1, 8, 8)
                assert torch.bincount(sample[part]["target"]).tolist() == [shots] * 3
                pixels = ((sample[part]["input"].double() * 0.3760 + 0.3053) * 16).round().flatten(1)
                keys = [tuple(row) for row in pixels.tolist()]
                assert [known[key] for key in keys] == sample["classes"][sample[part]["target"]].tolist()
                seen |= set(keys)
            assert len(seen) == 27  # no image twice


def test_samples_of_nested_tensors() -> None:
    dataset = InMemoryTensors({"a": torch.arange(3), "b": {"c": torch.arange(6).reshape(3, 2)}})
    assert len(dataset) == len(list(dataset)) == 3
    sample = dataset[2]
    assert (sample["a"].item(), sample["b"]["c"].tolist(), sample["index"].item()) == (2, [4, 5], 2)
    batch = dataset.__getitems__(torch.tensor([2, 0]))
    assert batch["b"]["c"].tolist() == [[4, 5], [0, 1]]


def test_tasks_of_one_document_each() -> None:
    data = PythonEpisodes({"train": 60, "val": 10, "test": 20}, num_support=3, num_query=2, length=24)
    documents = [document for name in data.domains for document in read_domain(name) if len(document) >= 5 * 25]
    seen: dict[str, set[int]] = {}
    for name in data.splits:
        for task in data.split(name):
            number, windows = int(task["document"]), set()
            seen.setdefault(name, set()).add(number)
            assert documents[number] in read_domain(data.domains[int(task["domain"])])
            for part, count in (("support", 3), ("query", 2)):
                assert task[part]["input"].shape == task[part]["target"].shape == (count, 24)
                assert torch.equal(task[part]["input"][:, 1:], task[part]["target"][:, :-1])
                whole = torch.cat([task[part]["input"], task[part]["target"][:, -1:]], dim=1)
                windows |= set(map(bytes, whole.tolist()))
            assert len(windows) == 5, "a window twice"
            assert windows <= {documents[number][begin : begin + 25] for begin in range(0, len(documents[number]), 25)}
    assert len(set.union(*seen.values())) == sum(map(len, seen.values()))
    assert len(seen["train"]) > 20


def test_the_function_is_matlabs() -> None:
    # Of its manual's formula, by hand at points where terms drop out.
    at_origin = 3 * exp(-1) - exp(-1) / 3
    at_one = -10 * (1 / 5 - 1) * exp(-1) - exp(-4) / 3
    found = peaks(np.array([0.0, 1.0]), np.array([0.0, 0.0]))
    np.testing.assert_allclose(found, [at_origin, at_one], rtol=1e-14)


def test_the_bins_are_of_equal_width_between_the_extremes() -> None:
    grid = np.stack(np.meshgrid(*[np.linspace(-3, 3, 601)] * 2), axis=-1).reshape(-1, 2)
    values = peaks(grid[:, 0], grid[:, 1])
    assert values.min() == pytest.approx(LOWEST, abs=1e-3)
    assert values.max() == pytest.approx(HIGHEST, abs=1e-3)
    assert LOWEST <= values.min() < values.max() <= HIGHEST
    edges = np.linspace(values.min(), values.max(), 6)
    expected = np.searchsorted(edges[1:-1], values)
    assert (expected != level(grid)).mean() < 1e-4  # the grid misses the extremes by a little


@pytest.mark.parametrize("balanced", [True, False])
def test_points_fill_the_square_and_have_their_level(balanced: bool) -> None:
    data = Peaks({"train": 1003, "val": 200, "test": 0}, balanced=balanced)
    assert (data.splits, data.num_classes, data.image_shape) == (("train", "val"), 5, (2,))
    batch = data.split("train").__getitems__(range(1003))
    assert batch["input"].dtype == torch.float32
    assert batch["input"].abs().max() <= 3
    assert np.array_equal(level(batch["input"].double().numpy()), batch["target"].numpy())
    counts = torch.bincount(batch["target"], minlength=5).tolist()
    if balanced:
        assert counts == [201, 201, 201, 200, 200]
    else:
        # Shares of the square's area: 2.8%, 12.2%, 72.4%, 9.8%, 2.8%.
        assert counts == pytest.approx([28, 122, 726, 98, 28], abs=45)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_points_lie_on_two_sides_of_a_plane(dtype: str) -> None:
    data = SyntheticClassification({"train": 500, "meta": 400, "test": 0}, dtype=dtype, noise=0.0)
    assert (data.splits, data.num_classes, data.image_shape) == (("train", "meta"), 2, (20,))
    batch = data.split("meta").__getitems__(range(400))
    assert batch["input"].dtype == data.true_weight.dtype == getattr(torch, dtype)
    assert torch.equal(batch["target"], (batch["input"] @ data.true_weight > 0).long())
    assert data.true_weight.abs().min() > 0
    assert batch["target"].float().mean() == pytest.approx(0.5, abs=0.1)
    assert not torch.equal(batch["input"], data.split("train").__getitems__(range(400))["input"])
    again = SyntheticClassification({"meta": 400}, dtype=dtype, noise=0.0)
    assert torch.equal(again.split("meta")[7]["input"], batch["input"][7])


def sides(text: str) -> list[int]:
    """Return what each judgement of a review says, read back from its words."""
    found, negated = [], False
    for word in split_words(text):
        if word in (".", ",", ";"):
            negated = False
        negated |= word in ("not", "never")
        for side in (NEGATIVE, POSITIVE):
            if word in ADJECTIVES[side]:
                found.append(1 - side if negated else side)
    return found


def test_the_label_of_a_review_follows_from_its_words() -> None:
    part = make_corpus(300, [0])
    assert torch.bincount(part.target).tolist() == [150, 150]
    for text, label in zip(part.texts, part.target.tolist(), strict=True):
        assert len(sides(text)) == 3
        assert int(sum(sides(text)) >= 2) == label


def test_rules_differ_in_accuracy_and_coverage() -> None:
    part = make_corpus(2000, [0])
    assert part.weak_labels is not None
    does_vote = part.weak_labels >= 0
    coverage = does_vote.float().mean(dim=0)
    accuracy = ((part.weak_labels == part.target[:, None]) & does_vote).sum(dim=0) / does_vote.sum(dim=0)
    assert part.weak_labels.shape == (2000, len(RULES))
    assert coverage.min() < 0.2 < 0.5 < coverage.max()
    assert 0.5 < accuracy.min() < 0.6
    assert accuracy.max() > 0.95


@pytest.mark.parametrize("labels", ["majority_vote", "label_model", "clean"])
def test_only_the_labels_of_train_are_weak(labels: str) -> None:
    sizes = {"train": 1000, "meta": 100, "val": 200}
    data = SyntheticText(sizes, labels=labels)
    train = data.split("train").__getitems__(range(len(data.split("train"))))
    assert train["input"].shape[1] == data.length
    assert int(train["input"].max()) < len(data.encoder) <= data.vocabulary_size
    assert (train["input"][:, -1] == 0).all(), "a review was cut"
    assert {name: len(data.split(name)) for name in ("meta", "val")} == {"meta": 100, "val": 200}
    if labels == "clean":
        assert (len(train["target"]), set(train)) == (1000, {"input", "target", "index"})
    else:
        assert 950 < len(train["target"]) < 1000
        right = (train["target"] == train["clean_target"]).float().mean()
        assert right == pytest.approx(0.75 if labels == "majority_vote" else 0.78, abs=0.03)
    assert set(data.split("meta")[0]) == {"input", "target", "index"}


TRAIN = {"train": 3}


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (Digits, {"sizes": TRAIN, "num_classes": 9}, r"data\.num_classes=9; expected 10.* Set data\.num_classes=10\."),
        (Digits, {"sizes": {"train": 1798}}, r"data\.sizes: found {train: 1798}; expected at most 1797"),
        (TwoDomains, {"sizes": TRAIN}, r"data\.sizes: found 'train'; expected some of pretrain, finetune"),
        (TwoDomains, {"sizes": {"pretrain": 1797}}, r"found 1797; expected a number from 0 to 1796"),
        (DigitsEpisodes, {"sizes": TRAIN, "num_classes": 5, "turn": False}, r"expected at least data\.num_classes=5"),
        (DigitsEpisodes, {"sizes": TRAIN, "classes": {"train": [0, 1], "val": [1]}}, r"each in one split at most"),
        (PythonEpisodes, {"sizes": {"meta": 3}}, r"data\.sizes: found 'meta'; expected some of train, val, test"),
        (PythonEpisodes, {"sizes": TRAIN, "length": 10**6}, r"a document for it with 8 windows of 1000001 bytes"),
        (PythonEpisodes, {"sizes": TRAIN, "shares": {"train": 0}}, r"expected numbers of which one is above 0"),
        (SyntheticClassification, {"sizes": TRAIN, "image_shape": [4, 5]}, r"found \[4, 5\]; expected \[d\]"),
        (SyntheticSpectra, {"sizes": TRAIN}, "expected at least 16 pixels in all"),
    ],
)
def test_what_cannot_be_is_refused(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(**options)
