"""The text sets of WRENCH, the benchmark of weak supervision."""

import json
from collections.abc import Mapping
from typing import Any

import torch

from mlotool.core.errors import ConfigError
from mlotool.core.files import at_home
from mlotool.core.settings import Count, Rounds, Seed, Whole, target
from mlotool.data.text_data import AbstractTextData, Labels, TextOptions, TextPart

FILES = ("train.json", "valid.json", "test.json")


@target("data")
class Wrench(AbstractTextData):
    """One text classification set of WRENCH, read from `root/{train,valid,test}.json`.

    `train` is of the published train part, with labels made of its votes; `meta` and `val` are disjoint draws of the
    published valid part, `test` of the test part, all with true labels. Of the relation sets (SemEval, ChemProt) the
    text is read without its marks of entities.

    Args:
        root: the folder that holds the three files.
        sizes: see `TextOptions`, as for all keywords.
        num_classes: number of classes.
        vocabulary_size: words at most, with padding and unknown.
        length: tokens of a text.
        labels: of `train`: `label_model`, `majority_vote` or `clean`.
        tokenizer: folder of a Hugging Face tokenizer; None: the words of `train`.
        seed: of the splits and of ties between votes.

    Raises:
        ConfigError: the files are not there or not laid out like this; the options do not fit the data.

    Source: Zhang et al. 2021, WRENCH: A Comprehensive Benchmark for Weak Supervision.
    """

    def __init__(
        self,
        root: str,
        sizes: Mapping[str, Whole],
        num_classes: Count,
        vocabulary_size: Count = 10000,
        length: Rounds = 128,
        labels: Labels = "label_model",
        tokenizer: str | None = None,
        seed: Seed = 0,
    ) -> None:
        train, valid, test = (_read_part(root, name) for name in FILES)
        super().__init__(
            {"train": train, "meta": valid, "val": valid, "test": test},
            TextOptions(sizes, num_classes, vocabulary_size, length, seed, labels, tokenizer=tokenizer),
        )


def _read_part(root: str, name: str) -> TextPart:
    samples = _read_json(root, name)
    try:
        # The file's own order: its keys are "0", "1", ...
        rows = [samples[key] for key in sorted(samples, key=int)]
        return TextPart(
            [row["data"]["text"] for row in rows],
            torch.tensor([int(row["label"]) for row in rows]),
            torch.tensor([row["weak_labels"] for row in rows], dtype=torch.int64),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"data.root={root}: {name} is no text set of WRENCH ({type(error).__name__}: {error}); expected "
            '{"0": {"label": 1, "weak_labels": [1, -1], "data": {"text": ".."}}, ..}. Unpack the published files again.'
        ) from error


def _read_json(root: str, name: str) -> dict[str, Any]:
    path = at_home(root) / name
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"data.root={root}: {path} could not be read ({error}); expected the files {', '.join(FILES)} of one data "
            "set of WRENCH there. Download its datasets (https://github.com/JieyuZ2/wrench), and set data.root to the "
            "folder of one of them."
        ) from error
    assert isinstance(found, dict), type(found)
    return found
