"""A small corpus of film reviews out of templates, with labelers that look for words: text without a download."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from mlotool.core.settings import Count, Rounds, target
from mlotool.data.text_data import ABSTAIN, AbstractTextData, Labels, TextPart, split_words

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
    """A labeler that votes for a class where a text has one of some words, and abstains elsewhere."""

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
    """Reviews of three judgements, of which most decide the label; nine keyword rules, blind to "not", vote on them.

    Whether a judgement is good or bad follows from its words alone, so the label is a function of the text, but not one
    of single words: "not dull" is good. Batches are those of `AbstractTextData`; `train` has wrong labels unless
    `labels` is `clean`, all other splits have true ones.

    Args:
        sizes: see `AbstractTextData`, as for all keywords; splits are any names.
        num_classes: 2, negative and positive.
        vocabulary_size: words at most, with padding and unknown.
        length: tokens of a text.
        labels: of `train`: `majority_vote`, `label_model` or `clean`.
        imbalance_factor: of the long tail of `train`, or None.
        tokenizer: folder of a Hugging Face tokenizer; None: the words of `train`.
        seed: of the texts and of ties between votes.

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
    """Write one review; at most one of its three judgements is against its label."""
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
