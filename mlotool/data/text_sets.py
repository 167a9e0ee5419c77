"""Text classification sets that lie as files: the sets of WRENCH, and the Stanford Sentiment Treebank."""

import csv
import json
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from mlotool.core.arguments import require
from mlotool.core.errors import ConfigError
from mlotool.core.settings import Count, Rounds, target
from mlotool.data.splits import FromFiles
from mlotool.data.text_data import AbstractTextData, Labels, TextPart

FILES = ("train.json", "valid.json", "test.json")


@target("data")
@dataclass(eq=False)
class Wrench(AbstractTextData, FromFiles):
    """One text classification set of WRENCH, read from `root/{train,valid,test}.json`.

    `train` is of the published train part, with labels made of its votes; `meta` and `val` are disjoint draws of the
    published valid part, `test` of the test part, all with true labels. Of the relation sets (SemEval, ChemProt) the
    text is read without its marks of entities.

    Args:
        root: the folder that holds the three files.
        sizes: see `AbstractTextData`, as for all keywords.
        num_classes: number of classes.
        vocabulary_size: words at most, with padding and unknown.
        length: tokens of a text.
        labels: of `train`: `label_model`, `majority_vote` or `clean`.
        imbalance_factor: of the long tail of `train`, or None.
        tokenizer: folder of a Hugging Face tokenizer; None: the words of `train`.
        seed: of the splits and of ties between votes.

    Raises:
        ConfigError: the files are not there or not laid out like this; the options do not fit the data.

    Source: Zhang et al. 2021, WRENCH: A Comprehensive Benchmark for Weak Supervision.
    """

    length: Rounds = 128
    labels: Labels = "label_model"

    def __post_init__(self) -> None:
        train, valid, test = map(self._read_part, FILES)
        self._split({"train": train, "meta": valid, "val": valid, "test": test})

    def _read_part(self, name: str) -> TextPart:
        path = self.folder / name
        try:
            samples = json.loads(path.read_text(encoding="utf-8"))
            # The file's own order: its keys are "0", "1", ...
            rows = [samples[key] for key in sorted(samples, key=int)]
            return TextPart(
                [row["data"]["text"] for row in rows],
                torch.tensor([int(row["label"]) for row in rows]),
                torch.tensor([row["weak_labels"] for row in rows], dtype=torch.int64),
            )
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"data.root={self.root}: {path} is no text set of WRENCH ({type(error).__name__}: {error}); expected "
                f'{", ".join(FILES)} there, of {{"0": {{"label": 1, "weak_labels": [1, -1], "data": {{"text": ".."}}}}'
                ", ..}. Download its datasets (https://github.com/JieyuZ2/wrench), and set data.root to the folder of "
                "one of them."
            ) from error


NEUTRAL = 2


@target("data")
@dataclass(eq=False)
class SST(AbstractTextData, FromFiles):
    """Sentences of film reviews with their sentiment.

    - GLUE's SST-2, from `root/train.tsv` and `root/dev.tsv` (67,349 phrases and 872 sentences, 2 classes): `train`,
      `meta` and `val` are drawn from train.tsv, `test` from dev.tsv, as GLUE's test labels are not published.
    - The trees, from `root/{train,dev,test}.txt` (8,544, 1,101 and 2,210 sentences, 5 classes; with `num_classes` 2,
      neutral ones are left out and 6,920, 872 and 1,821 remain): `train` and `meta` are drawn from train.txt, `val`
      from dev.txt, `test` from test.txt.

    Args:
        root: the folder that holds the files of either.
        sizes: see `AbstractTextData`, as for all keywords.
        num_classes: 2, or 5 of the trees.
        vocabulary_size: words at most, with padding and unknown.
        length: tokens of a text.
        labels: `clean`, as there are no votes.
        imbalance_factor: of the long tail of `train`, or None.
        tokenizer: folder of a Hugging Face tokenizer; None: the words of `train`.
        seed: of the splits.

    Raises:
        ConfigError: the files are not there or not laid out like this; the options do not fit the data.

    Source: Socher et al. 2013, Recursive Deep Models for Semantic Compositionality; Wang et al. 2018, GLUE.
    """

    num_classes: Count = 2

    def __post_init__(self) -> None:
        folder = self.folder
        if (folder / "train.tsv").is_file() and (folder / "dev.tsv").is_file():
            train, dev = _read_table(folder / "train.tsv"), _read_table(folder / "dev.tsv")
            self._split({"train": train, "meta": train, "val": train, "test": dev})
        elif all((folder / f"{name}.txt").is_file() for name in ("train", "dev", "test")):
            paths = [folder / f"{name}.txt" for name in ("train", "dev", "test")]
            train, dev, test = (_read_trees(path, self.num_classes) for path in paths)
            self._split({"train": train, "meta": train, "val": dev, "test": test})
        else:
            raise ConfigError(
                f"data.root={self.root} has neither train.tsv and dev.tsv nor train.txt, dev.txt and test.txt; "
                "expected SST-2 of GLUE or the trees of SST. Download SST-2.zip from https://gluebenchmark.com/tasks "
                "or trainDevTestTrees_PTB.zip from https://nlp.stanford.edu/sentiment, unpack it, and set data.root "
                "to its folder."
            )


def _read_table(path: Path) -> TextPart:
    with path.open(encoding="utf-8", newline="") as file:
        # Quotes are part of the sentences.
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    try:
        return TextPart([row["sentence"] for row in rows], torch.tensor([int(row["label"]) for row in rows]))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path} is no table of SST-2 ({type(error).__name__}: {error}); expected the columns sentence and label, "
            "separated by tabs. Unpack the published file again."
        ) from error


def _read_trees(path: Path, num_classes: int) -> TextPart:
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    texts, labels = [], []
    for line in lines:
        # "(3 (2 It) (4 (2 's) (3 good)))": the first label is the sentence's, its words stand before a bracket closes.
        match = re.match(r"\(([0-4]) ", line)
        expected = "trees such as (3 (2 It) (4 good))"
        require(match is not None, str(path), line[:40], expected, "Unpack the published file again.")
        assert match is not None
        label = int(match[1])
        if num_classes == 2:
            if label == NEUTRAL:
                continue
            label = int(label > NEUTRAL)
        texts.append(" ".join(re.findall(r" ([^()\s]+)\)", line)))
        labels.append(label)
    return TextPart(texts, torch.tensor(labels, dtype=torch.int64))
