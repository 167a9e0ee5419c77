"""The readers of text, on tiny data sets written in the published formats."""

import json
from pathlib import Path

import pytest
import torch

from mlotool.core.errors import ConfigError
from mlotool.data import SST, Wrench


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
    assert {name: tuple(values.shape) for name, values in batch.items()} == {
        "input": (3, 5),
        "target": (3,),
        "index": (3,),
    }
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


def test_other_layouts_are_named(wrench: Path) -> None:
    (wrench / "valid.json").write_text(json.dumps({"0": {"label": 1}}))
    with pytest.raises(ConfigError, match=r"valid\.json is no text set of WRENCH \(KeyError: 'data'\); expected"):
        Wrench(str(wrench), SIZES, 2)
    (wrench / "valid.json").write_text("{")
    with pytest.raises(ConfigError, match=r"valid\.json could not be read"):
        Wrench(str(wrench), SIZES, 2)


@pytest.mark.parametrize("make", [lambda root: Wrench(root, SIZES, 2), lambda root: SST(root, SIZES)])
def test_absent_files_are_named(tmp_path: Path, make: type) -> None:
    with pytest.raises(ConfigError, match=r"data\.root=.*absent.*expected .*Download .*https://.*set data\.root"):
        make(str(tmp_path / "absent"))


def test_votes_are_needed_for_labels_of_votes(wrench: Path) -> None:
    samples = json.loads((wrench / "train.json").read_text())
    for sample in samples.values():
        sample["weak_labels"] = [-1, -1, -1]
    (wrench / "train.json").write_text(json.dumps(samples))
    with pytest.raises(ConfigError, match=r"data\.labels=label_model; expected votes"):
        Wrench(str(wrench), SIZES, 2)


def test_unknown_options_are_refused(wrench: Path) -> None:
    with pytest.raises(ConfigError, match=r"the split 'valid'; expected some of train, meta, val, test"):
        Wrench(str(wrench), {"valid": 3}, 2)
    with pytest.raises(ConfigError, match=r"data\.num_classes=3; expected 2"):
        Wrench(str(wrench), SIZES, 3)


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


def test_what_is_no_tree_is_refused(tmp_path: Path) -> None:
    for name in ("train", "dev", "test"):
        (tmp_path / f"{name}.txt").write_text("It is good\n")
    with pytest.raises(ConfigError, match=r"has the line 'It is good'; expected a tree"):
        SST(str(tmp_path), SIZES)
