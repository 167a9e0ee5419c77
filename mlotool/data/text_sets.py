"""Text classification: the data sets of WRENCH, the Stanford Sentiment Treebank, and generated reviews."""

import csv
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from mlotool.core.arguments import require
from mlotool.core.errors import ConfigError
from mlotool.core.settings import Count, Rounds, target
from mlotool.data.splits import FromFiles
from mlotool.data.text_data import ABSTAIN, AbstractTextData, Labels, TextPart, split_words

FILES = ("train.json", "valid.json", "test.json")


@target("data")
@dataclass(eq=False)
class Wrench(AbstractTextData, FromFiles):
    """One text classification set of WRENCH, read from `root/{train,valid,test}.json`.

    `train` is drawn from the published train part, with labels that are made from its votes. `meta` and `val` are drawn
    from the published valid part, disjoint, and `test` from the test part, all with true labels. The texts of the
    relation data sets (SemEval, ChemProt) are read without their entity marks.

    Args:
        root: the folder with the three files.
        sizes: number of texts by split name; see `AbstractTextData`.
        num_classes: number of classes.
        vocabulary_size: the most token ids, including padding and unknown.
        length: number of tokens to which texts are cut or padded.
        labels: labels of `train`: `label_model`, `majority_vote` or `clean`.
        imbalance_factor: factor between the most common and the rarest class of `train`, or None.
        tokenizer: folder of a Hugging Face tokenizer; None: the words of `train`.
        seed: seed of the splits and of ties between votes.

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
                f"data.root={self.root}: {path} is not a text data set of WRENCH ({type(error).__name__}: {error}); "
                "expected "
                f'{", ".join(FILES)} there, of {{"0": {{"label": 1, "weak_labels": [1, -1], "data": {{"text": ".."}}}}'
                ", ..}. Download its datasets (https://github.com/JieyuZ2/wrench), and set data.root to the folder of "
                "one of them."
            ) from error


NEUTRAL_LABEL = 2


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
        root: the folder with the files of one of the two.
        sizes: number of texts by split name; see `AbstractTextData`.
        num_classes: 2, or 5 for the trees.
        vocabulary_size: the most token ids, including padding and unknown.
        length: number of tokens to which texts are cut or padded.
        labels: `clean`, as there are no votes.
        imbalance_factor: factor between the most common and the rarest class of `train`, or None.
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
                f"data.root={self.root}; expected a folder with train.tsv and dev.tsv (SST-2), or with train.txt, "
                "dev.txt and test.txt (trees). Download SST-2.zip from https://gluebenchmark.com/tasks or "
                "trainDevTestTrees_PTB.zip from https://nlp.stanford.edu/sentiment, and set data.root to its folder."
            )


def _read_table(path: Path) -> TextPart:
    with path.open(encoding="utf-8", newline="") as file:
        # Quotes are part of the sentences.
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    try:
        return TextPart([row["sentence"] for row in rows], torch.tensor([int(row["label"]) for row in rows]))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path} is not a table of SST-2 ({type(error).__name__}: {error}); expected the columns sentence and "
            "label, separated by tabs. Unpack the published file again."
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
            if label == NEUTRAL_LABEL:
                continue
            label = int(label > NEUTRAL_LABEL)
        texts.append(" ".join(re.findall(r" ([^()\s]+)\)", line)))
        labels.append(label)
    return TextPart(texts, torch.tensor(labels, dtype=torch.int64))


NEGATIVE, POSITIVE = 0, 1
NOUNS = ("film", "plot", "acting", "music", "ending", "cast", "script", "camera", "story", "dialogue")
ADJECTIVES = (
    ("awful", "terrible", "boring", "tedious", "dull", "clumsy", "stale", "weak", "silly", "empty"),
    ("great", "wonderful", "brilliant", "superb", "moving", "funny", "charming", "fresh", "clever", "warm"),
)
# They say nothing, but some are used more often on one side.
NEUTRAL = (("long", "dark", "loud", "strange"), ("quiet", "simple", "strange", "dark"))
PLAIN = ("the {noun} was {word}", "i found the {noun} {word}", "its {noun} is {word}", "{word} {noun} all through")
NEGATED = ("the {noun} was not {word}", "i would not call the {noun} {word}", "its {noun} is never {word}")
ENDINGS = (("i want my money back", "do not bother"), ("i would see it again", "go and see it"))
JOINTS = (" . ", " , and ", " ; ")
NUM_CLAUSES, MINORITY_RATE, NEGATED_RATE, NEUTRAL_RATE, ENDING_RATE = 3, 0.15, 0.25, 0.4, 0.3


class KeywordRule(NamedTuple):
    """A labeler that votes for a class if a text has one of some words, and abstains otherwise."""

    label: int
    words: frozenset[str]

    def vote(self, text: str) -> int:
        """Return the class, or -1."""
        return self.label if self.words & set(split_words(text)) else ABSTAIN


RULES = (
    KeywordRule(POSITIVE, frozenset(ADJECTIVES[POSITIVE][:4])),
    KeywordRule(POSITIVE, frozenset(ADJECTIVES[POSITIVE][4:7])),
    KeywordRule(NEGATIVE, frozenset(ADJECTIVES[NEGATIVE][:4])),
    KeywordRule(NEGATIVE, frozenset(ADJECTIVES[NEGATIVE][4:6])),
    KeywordRule(POSITIVE, frozenset({"again", "go"})),
    KeywordRule(NEGATIVE, frozenset({"money", "bother"})),
    KeywordRule(NEGATIVE, frozenset({"not", "never"})),
    KeywordRule(NEGATIVE, frozenset({"dark", "long", "loud"})),
    KeywordRule(POSITIVE, frozenset({"quiet", "simple", "music"})),
)


@target("data")
@dataclass(eq=False)
class SyntheticText(AbstractTextData):
    """Generated reviews of three judgments, whose majority is the label, with the votes of nine keyword rules.

    The label is a function of the text, but not of single words: "not dull" is a good judgment. The rules ignore "not",
    so some of their votes are wrong. Batches are those of `AbstractTextData`. `train` has wrong labels unless `labels`
    is `clean`; all other splits have true labels.

    Args:
        sizes: number of texts by split name, with any names; see `AbstractTextData`.
        num_classes: 2, negative and positive.
        vocabulary_size: the most token ids, including padding and unknown.
        length: number of tokens to which texts are cut or padded.
        labels: labels of `train`: `majority_vote`, `label_model` or `clean`.
        imbalance_factor: factor between the most common and the rarest class of `train`, or None.
        tokenizer: folder of a Hugging Face tokenizer; None: the words of `train`.
        seed: seed of the texts and of ties between votes.

    Example:
        >>> data = SyntheticText({"train": 200, "val": 50})
        >>> data.split("val").__getitems__([0, 1])["input"].shape
        torch.Size([2, 40])
    """

    num_classes: Count = 2
    vocabulary_size: Count = 100
    length: Rounds = 40
    labels: Labels = "majority_vote"

    def __post_init__(self) -> None:
        self._split({name: make_corpus(int(size), [self.seed, *name.encode()]) for name, size in self.sizes.items()})


def make_corpus(size: int, seed: list[int]) -> TextPart:
    """Write `size` reviews, half of them positive, and let all rules vote on them."""
    generator = np.random.default_rng(seed)
    target = generator.permutation(np.arange(size) % 2)
    texts = [_write(int(label), generator) for label in target]
    votes = torch.tensor([[rule.vote(text) for rule in RULES] for text in texts]).reshape(size, len(RULES))
    return TextPart(texts, torch.from_numpy(target).long(), votes)


def _write(label: int, generator: np.random.Generator) -> str:
    """Write one review; at most one of its three judgments is against its label."""
    sides = [label] * NUM_CLAUSES
    if generator.random() < NUM_CLAUSES * MINORITY_RATE:
        sides[generator.integers(NUM_CLAUSES)] = 1 - label
    clauses = [_judge(side, generator) for side in sides]
    if generator.random() < NEUTRAL_RATE:
        clauses.append(_fill(_pick(PLAIN, generator), NEUTRAL[label], generator))
    order = generator.permutation(len(clauses))
    if generator.random() < ENDING_RATE:
        clauses.append(_pick(ENDINGS[label], generator))
        order = np.append(order, len(clauses) - 1)
    return _pick(JOINTS, generator).join(clauses[i] for i in order) + " ."


def _judge(side: int, generator: np.random.Generator) -> str:
    if generator.random() < NEGATED_RATE:
        return _fill(_pick(NEGATED, generator), ADJECTIVES[1 - side], generator)
    return _fill(_pick(PLAIN, generator), ADJECTIVES[side], generator)


def _fill(template: str, words: tuple[str, ...], generator: np.random.Generator) -> str:
    return template.format(noun=_pick(NOUNS, generator), word=_pick(words, generator))


def _pick(options: tuple[str, ...], generator: np.random.Generator) -> str:
    return options[generator.integers(len(options))]
