"""Made-up data: points and texts."""

import pytest
import torch

from mlotool.core.errors import ConfigError
from mlotool.data import SyntheticClassification, SyntheticText
from mlotool.data.synthetic_text import ADJECTIVES, NEGATIVE, POSITIVE, RULES, make_corpus
from mlotool.data.text_data import split_words


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


def test_noise_and_features_that_say_nothing() -> None:
    data = SyntheticClassification({"train": 4000}, image_shape=[6], num_informative=2, noise=1.0)
    assert (data.true_weight != 0).tolist() == [True, True, False, False, False, False]
    batch = data.split("train").__getitems__(range(4000))
    wrong = (batch["target"] != (batch["input"] @ data.true_weight > 0)).float().mean()
    # Of the sign of a sum of two normal numbers: arctan(noise / |w|) / pi.
    expected = torch.atan(1.0 / data.true_weight.norm()) / torch.pi
    assert wrong == pytest.approx(expected.item(), abs=0.02)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_classes": 3}, r"data\.num_classes=3; expected 2"),
        ({"image_shape": [4, 5]}, r"data\.image_shape=\[4, 5\]; expected \[d\]"),
        ({"num_informative": 21}, r"data\.num_informative=21; expected null or a number from 1 to 20"),
    ],
)
def test_points_that_cannot_be_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SyntheticClassification({"train": 5}, **options)


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


def test_the_words_of_train_do_not_depend_on_the_other_splits() -> None:
    first, other = SyntheticText({"train": 50}), SyntheticText({"train": 50, "val": 10})
    assert torch.equal(first.split("train").values["input"], other.split("train").values["input"])
    assert not torch.equal(
        first.split("train")[0]["input"], SyntheticText({"train": 50}, seed=1).split("train")[0]["input"]
    )
