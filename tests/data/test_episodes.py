"""Data whose samples are tasks."""

import pytest
import torch
from sklearn.datasets import load_digits

from mlotool.core.errors import ConfigError
from mlotool.data import DigitsEpisodes, InMemoryTensors, PythonEpisodes, SinusoidEpisodes
from mlotool.data.python_text import read_domain


def test_a_batch_has_the_tasks_first() -> None:
    batch = SinusoidEpisodes({"train": 8}, num_support=5, num_query=7).split("train").__getitems__([3, 1])
    assert batch["support"]["input"].shape == batch["support"]["target"].shape == (2, 5, 1)
    assert batch["query"]["input"].shape == (2, 7, 1)
    assert batch["index"].tolist() == [3, 1]


def test_sinusoids_are_what_they_say() -> None:
    data = SinusoidEpisodes({"train": 500, "val": 20, "none": 0})
    assert data.splits == ("train", "val")
    batch = data.split("train").__getitems__(range(500))
    for part in ("support", "query"):
        x, y = batch[part]["input"], batch[part]["target"]
        assert x.dtype == y.dtype == torch.float32
        expected = batch["amplitude"][:, None, None] * torch.sin(x - batch["phase"][:, None, None])
        torch.testing.assert_close(y, expected, atol=1e-5, rtol=0)
        assert x.abs().max() <= 5
    assert 0.1 <= batch["amplitude"].min() < 0.3
    assert 4.8 < batch["amplitude"].max() <= 5
    assert 0 <= batch["phase"].min() <= batch["phase"].max() <= torch.pi


@pytest.mark.parametrize("make", [SinusoidEpisodes, DigitsEpisodes, PythonEpisodes])
def test_the_seed_and_the_split_decide_the_tasks(make: type) -> None:
    def first(split: str, **settings: object) -> torch.Tensor:
        return make(**({"sizes": {"train": 10, "val": 5}} | settings)).split(split)[0]["support"]["input"]

    assert torch.equal(first("val"), first("val", sizes={"train": 20, "val": 5}))
    assert not torch.equal(first("val"), first("val", seed=1))
    assert not torch.equal(first("val"), first("train"))


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_classes": 5, "turn": False},
            r"data\.classes\.train has 4 classes; expected at least data\.num_classes=5",
        ),
        ({"classes": {"train": [0, 1, 2], "val": [2, 3, 4]}}, r"data\.classes=.*each in one split at most"),
        ({"sizes": {"training": 3}}, r"the split 'training'; expected some of train, val, test\. Did you mean 'train'"),
        ({"image_shape": (64,)}, r"data\.image_shape=\[64\]; expected \[1, 8, 8\]"),
    ],
)
def test_digit_tasks_that_cannot_be_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DigitsEpisodes(**({"sizes": {"train": 3}} | options))


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
                places = [
                    place
                    for window in whole.tolist()
                    if (place := aligned(documents[number], bytes(window))) is not None
                ]
                assert len(places) == count, "not a window of its document"
                windows |= set(places)
            assert len(windows) == 5, "a window twice"
    assert not seen["train"] & seen["val"]
    assert not seen["train"] & seen["test"]
    assert not seen["val"] & seen["test"]
    assert len(seen["train"]) > 20


def aligned(document: bytes, window: bytes) -> bytes | None:
    """Return the window, if it is one of those that the document is cut into."""
    cut = {document[begin : begin + len(window)] for begin in range(0, len(document), len(window))}
    return window if window in cut else None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"domains": ["docs"]}, r"data\.domains: found 'docs'; expected some of documentation"),
        ({"shares": {"train": 1, "dev": 1}}, r"the split 'dev'; expected some of train, val, test"),
        ({"sizes": {"meta": 3}}, r"the split 'meta'; expected some of train, val, test"),
        ({"length": 10**6}, r"no document is left for a split whose data\.sizes is 3; .*8 windows of 1000001 bytes"),
        ({"shares": {"train": 0}}, r"data\.shares=.*expected numbers from 0 on, not all of them 0"),
        ({"shares": {"test": 1}}, r"no document is left for a split"),
    ],
)
def test_tasks_of_documents_that_cannot_be_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PythonEpisodes(**({"sizes": {"train": 3}} | options))
