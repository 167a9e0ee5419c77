"""The text sets of WRENCH, the benchmark of weak supervision."""

import json
from dataclasses import dataclass

import torch

from mlotool.core.errors import ConfigError
from mlotool.core.settings import Rounds, target
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
