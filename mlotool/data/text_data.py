"""What all text data objects share: texts with labels and votes go in, splits of token ids come out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mlotool.core.errors import ConfigError
from mlotool.data.image_data import checked_num_classes
from mlotool.data.in_memory_tensors import InMemoryTensors
from mlotool.data.sampling import long_tail_indices, split_indices
from mlotool.data.splits import AbstractData, check_choice, check_splits
from mlotool.data.vocabulary import Encoder, LocalTokenizer, Vocabulary
from mlotool.data.weak_labels import hard_labels, is_covered, label_model, majority_vote

# n: texts, m: labelers, t: length in tokens

LABELS = ("clean", "majority_vote", "label_model")


@dataclass(frozen=True)
class TextPart:
    """A published part of a data set: n texts, `target` (n,) int64, and votes (n, m) int64, -1 for none, or None."""

    texts: Sequence[str]
    target: Tensor
    weak_labels: Tensor | None = None

    def at(self, indices: Tensor) -> "TextPart":
        """Return the texts at `indices`, in that order."""
        votes = None if self.weak_labels is None else self.weak_labels[indices]
        return TextPart([self.texts[i] for i in indices.tolist()], self.target[indices], votes)


@dataclass(frozen=True)
class TextOptions:
    """The keywords that text data objects have.

    Args:
        sizes: number of texts by split name, before the long tail and before those without a vote are left out.
        num_classes: must be what the data has; it stands in the configuration so that models can refer to it.
        vocabulary_size: words at most, with padding (0) and unknown (1); likewise.
        length: tokens of a text, cut or padded; likewise.
        seed: of the splits and of ties between votes.
        labels: of `train`. `clean`: the true ones; `majority_vote` or `label_model`: made of the votes, without the
            texts on which nobody votes. The label model is told how common the classes are in `meta` and `val`.
        imbalance_factor: of the long tail of `train`, by its true labels; None: as it is. See `long_tail_counts`.
        tokenizer: folder of a Hugging Face tokenizer; None: the words of `train`.
    """

    sizes: Mapping[str, int]
    num_classes: int
    vocabulary_size: int
    length: int
    seed: int = 0
    labels: str = "clean"
    imbalance_factor: float | None = None
    tokenizer: str | None = None


class AbstractTextData(AbstractData[InMemoryTensors]):
    """Base of the text data; a leaf reads its files and hands them to this constructor.

    Batches are `{"input": (b, t) int64 token ids, "target": (b,) int64, "index": (b,) int64}`, and, of a `train` whose
    labels are made of votes, `"clean_target": (b,) int64` and `"weak_labels": (b, m) int64`.

    Args:
        parts: by split name, what it is drawn from; where several name the same part, their draws are disjoint.
        options: what the recipe asks for.

    Raises:
        ConfigError: the options do not fit the data.
    """

    vocabulary_size: int
    length: int

    def __init__(self, parts: Mapping[str, TextPart], options: TextOptions) -> None:
        check_splits(options.sizes, tuple(parts))
        check_choice("labels", options.labels, LABELS)
        self.num_classes = checked_num_classes(torch.cat([part.target for part in parts.values()]), options.num_classes)
        self.vocabulary_size, self.length = options.vocabulary_size, options.length
        drawn = _draw(parts, options)
        clean_target = None
        if "train" in drawn:
            drawn["train"], clean_target = _make_train(drawn["train"], _class_balance(drawn, options), options)
        self.encoder = _make_encoder(drawn, options)
        datasets = {}
        for name, part in drawn.items():
            values = {"input": self.encoder.encode(part.texts, options.length), "target": part.target}
            if name == "train" and clean_target is not None:
                assert part.weak_labels is not None
                values |= {"clean_target": clean_target, "weak_labels": part.weak_labels}
            datasets[name] = InMemoryTensors(values)
        super().__init__(datasets)


def _draw(parts: Mapping[str, TextPart], options: TextOptions) -> dict[str, TextPart]:
    drawn: dict[str, TextPart] = {}
    for part in {id(part): part for part in parts.values()}.values():
        sizes = {name: int(size) for name, size in options.sizes.items() if parts[name] is part}
        drawn.update(
            (name, part.at(indices)) for name, indices in split_indices(part.target, sizes, options.seed).items()
        )
    return {name: drawn[name] for name in options.sizes if name in drawn}


def _class_balance(drawn: Mapping[str, TextPart], options: TextOptions) -> Tensor:
    """Return how common the classes are where true labels may be looked at: in `meta` and `val`; else equally."""
    known = [drawn[name].target for name in ("meta", "val") if name in drawn]
    # One more of each: a class that is not there may still exist.
    return 1.0 + torch.bincount(torch.cat([*known, torch.empty(0, dtype=torch.int64)]), minlength=options.num_classes)


def _make_train(part: TextPart, class_balance: Tensor, options: TextOptions) -> tuple[TextPart, Tensor | None]:
    """Return the train texts with the labels to train on, and their true ones if those are others."""
    if options.imbalance_factor is not None:
        part = part.at(long_tail_indices(part.target, options.num_classes, options.imbalance_factor))
    if options.labels == "clean":
        return part, None
    if part.weak_labels is None or not bool(is_covered(part.weak_labels).any()):
        raise ConfigError(
            f"data.labels={options.labels}; expected votes on the texts of train, which this data does not have. "
            "Set data.labels=clean."
        )
    part = part.at(torch.nonzero(is_covered(part.weak_labels)).squeeze(1))
    assert part.weak_labels is not None
    if options.labels == "majority_vote":
        probabilities = majority_vote(part.weak_labels, options.num_classes)
    else:
        probabilities = label_model(part.weak_labels, options.num_classes, class_balance=class_balance).probabilities
    return TextPart(part.texts, hard_labels(probabilities, options.seed), part.weak_labels), part.target


def _make_encoder(drawn: Mapping[str, TextPart], options: TextOptions) -> Encoder:
    if options.tokenizer is not None:
        encoder = LocalTokenizer(options.tokenizer)
        if len(encoder) > options.vocabulary_size:
            raise ConfigError(
                f"data.vocabulary_size={options.vocabulary_size}; expected at least {len(encoder)}, the tokens of "
                f"data.tokenizer={options.tokenizer}. Set data.vocabulary_size={len(encoder)}."
            )
        return encoder
    texts = drawn["train"].texts if "train" in drawn else [text for part in drawn.values() for text in part.texts]
    return Vocabulary.of(texts, options.vocabulary_size)
