"""What all text data sets share: how texts with labels and votes become splits of token ids.

A labeler votes for a class or abstains. Both ways to combine votes give probabilities; `hard_labels` makes labels of
them.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from mlotool.core.arguments import require
from mlotool.core.errors import ConfigError
from mlotool.core.settings import Count, Rounds, Seed, Whole
from mlotool.data import splits
from mlotool.data.splits import AbstractData, ImbalanceFactor, InMemoryTensors
from mlotool.folders import hub

# n: texts, t: length in tokens

PADDING, UNKNOWN = 0, 1


class Vocabulary:
    """The most common words of some texts; id 0 is padding, and id 1 stands for unknown words.

    Words are sequences of letters, digits and apostrophes, in lower case; any other character except space is a word
    too.

    Args:
        words: the words with the ids 2, 3, ...

    Example:
        >>> Vocabulary.of(["A good film.", "a bad one"], max_size=5).encode(["a good one"], length=4)
        tensor([[2, 1, 1, 0]])
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.words = ("<padding>", "<unknown>", *words)
        self._ids = {word: number for number, word in enumerate(self.words)}

    @classmethod
    def of(cls, texts: Sequence[str], max_size: int) -> "Vocabulary":
        """Return the vocabulary of `texts`, with at most `max_size` ids including the two special ones.

        Equally common words are taken in alphabetical order, so that the result does not depend on the order of the
        texts.
        """
        counts = Counter(word for text in texts for word in split_words(text))
        ranked = sorted(counts, key=lambda word: (-counts[word], word))
        return cls(ranked[: max(max_size - 2, 0)])

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, texts: Sequence[str], length: int) -> Tensor:
        """Return token ids (n, t) int64; longer texts are cut at the end, and shorter ones are padded."""
        ids = torch.full((len(texts), length), PADDING, dtype=torch.int64)
        for row, text in enumerate(texts):
            token_ids = [self._ids.get(word, UNKNOWN) for word in split_words(text)[:length]]
            ids[row, : len(token_ids)] = torch.tensor(token_ids, dtype=torch.int64)
        return ids


def split_words(text: str) -> list[str]:
    """Return the words of a text, in lower case."""
    return re.findall(r"[\w']+|[^\w\s]", text.lower())


class LocalTokenizer:
    """A Hugging Face tokenizer for texts of one length.

    Args:
        path: the folder, as `save_pretrained` writes it; or a name on the Hub that the user has allowed.
        vocabulary_size: of the models, at least its number of tokens.

    Raises:
        ConfigError: transformers is not installed, there is no tokenizer in the folder, or it has too many tokens.
    """

    def __init__(self, path: str, vocabulary_size: int) -> None:
        self._tokenizer = load_tokenizer(path, vocabulary_size)
        # A model has to tell padding from words by its id.
        padding, expected = self._tokenizer.pad_token_id, f"one whose padding has the id {PADDING}, as BERT's has"
        require(padding == PADDING, "data.tokenizer", path, expected, f"Its padding has the id {padding}.")

    def encode(self, texts: Sequence[str], length: int) -> Tensor:
        """Return (n, t) int64, with the tokenizer's own first and last token."""
        encoding = self._tokenizer(list(texts), truncation=True, max_length=length, padding="max_length")
        return torch.tensor(encoding["input_ids"], dtype=torch.int64)


def load_tokenizer(path: str, vocabulary_size: int) -> Any:
    """Return the Hugging Face tokenizer of a folder, no code of which is run.

    Args:
        path: the folder, as `save_pretrained` writes it; or a name on the Hub that the user has allowed.
        vocabulary_size: of the models, at least its number of tokens.

    Raises:
        ConfigError: transformers is not installed, there is no tokenizer in the folder, or it has too many tokens.
    """
    tokenizer = read_tokenizer(path)
    expected = f"at least {len(tokenizer)}, the tokens of data.tokenizer={path}"
    require(len(tokenizer) <= vocabulary_size, "data.vocabulary_size", vocabulary_size, expected)
    return tokenizer


def read_tokenizer(path: str) -> Any:
    """Return the Hugging Face tokenizer of a folder, or of a name on the Hub that the user has allowed.

    Raises:
        ConfigError: transformers is not installed, or there is no tokenizer.
    """
    try:
        from transformers import AutoTokenizer  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise ConfigError(
            f"data.tokenizer={path} needs transformers, which is not installed; expected it, or data.tokenizer=null. "
            "Run pip install 'mlotool[text]'."
        ) from error
    # Transformers would take a folder that is missing for a name on the Hub.
    folder = hub.folder_of("data.tokenizer", path)
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"data.tokenizer={path}: no tokenizer could be read ({str(error).splitlines()[0]}); expected a folder with "
            "tokenizer.json, as save_pretrained writes it. Correct data.tokenizer, or set it to null."
        ) from error


# n: samples, m: labelers, k: classes

ABSTAIN = -1
# Votes that each labeler is given beforehand, of which INITIAL_ACCURACY are right: without them one that votes twice
# and is never contradicted would be infallible, and its word the only one that counts.
PRIOR_VOTES = 10.0
INITIAL_ACCURACY = 0.7
# Of iterative scaling; each EM step begins anew.
NUM_BALANCING_STEPS = 50


def majority_vote(weak_labels: Tensor, num_classes: int, abstain: int = ABSTAIN) -> Tensor:
    """Return the probabilities of classes by majority vote: 1 for the class with the most votes, equal shares for ties.

    Args:
        weak_labels: (n, m) int64, classes from 0 to k - 1 or `abstain`.
        num_classes: k.
        abstain: the value of no vote.

    Returns:
        (n, k) float64; where all abstain, 1 / k everywhere.

    Example:
        >>> majority_vote(torch.tensor([[1, 1, 0], [0, 1, -1], [-1, -1, -1]]), 2)
        tensor([[0.0000, 1.0000],
                [0.5000, 0.5000],
                [0.5000, 0.5000]], dtype=torch.float64)
    """
    counts = _votes(weak_labels, num_classes, abstain).sum(dim=1)
    is_most = (counts == counts.max(dim=1, keepdim=True).values).to(torch.float64)
    return is_most / is_most.sum(dim=1, keepdim=True)


@dataclass(frozen=True)
class LabelModel:
    """A fitted label model.

    Attributes:
        accuracy: (m,) a_j, how often labeler j is right when it votes.
        probabilities: (n, k) q_ic, that sample i is of class c; the class balance where all abstain.
        num_iterations: number of iterations.
    """

    accuracy: Tensor
    probabilities: Tensor
    num_iterations: int


def label_model(
    weak_labels: Tensor,
    num_classes: int,
    abstain: int = ABSTAIN,
    class_balance: Tensor | None = None,
    max_iterations: int = 200,
    prior_votes: float = PRIOR_VOTES,
    tolerance: float = 1e-7,
) -> LabelModel:
    """Fit the model of data programming with independent labelers by expectation maximization.

        p(l_i1 .. l_im | y_i) = prod_j  1 - b_j                     if labeler j abstains
                                        b_j a_j                     if l_ij = y_i
                                        b_j (1 - a_j) / (k - 1)     else

        E:  q_ic = w_c p(l_i | y_i = c) / sum_d w_d p(l_i | y_i = d),   w such that the mean of q is the class balance
        M:  a_j = (sum over i that j votes on of q_i[l_ij] + 0.7 s) / (number of its votes + s),   s = prior_votes

    Abstaining does not depend on the label, so b_j cancels. The class balance is fixed (posterior regularization) and
    not fitted: rules that vote for one class only would otherwise fit best with all samples in that class. Samples
    without votes are left out. Ties remain ties in q; `hard_labels` breaks them.

    Args:
        weak_labels: (n, m) int64, classes from 0 to k - 1 or `abstain`.
        num_classes: k, at least 2.
        abstain: the value of no vote.
        class_balance: (k,), the frequencies of the classes; None: equal ones.
        max_iterations: the most iterations of both steps.
        prior_votes: s; 0: none.
        tolerance: the fit stops when no accuracy changes by more than this.

    Returns:
        The fitted model, float64. Cost: O(p m k) per iteration, where p is the number of different rows of votes.

    Source: Ratner et al. 2016, Data Programming, section 3 (equation 1, for two equally common classes; for more, the
    errors are shared evenly, the one-coin variant of Dawid and Skene 1979); Ganchev et al. 2010, Posterior
    Regularization, for the E step.

    Example:
        >>> model = label_model(torch.tensor([[0, 0, 1], [1, 1, 0], [0, 0, -1], [1, 1, 1]]), 2)
        >>> bool(model.accuracy[0] > model.accuracy[2])
        True
    """
    balance = (torch.ones(num_classes) if class_balance is None else class_balance).to(torch.float64)
    balance = balance / balance.sum()
    covered = is_covered(weak_labels, abstain)
    # Many samples have the same votes.
    patterns, pattern_of, counts = weak_labels[covered].unique(dim=0, return_inverse=True, return_counts=True)
    counts = counts.to(torch.float64)
    votes, shares = _votes(patterns, num_classes, abstain), counts / counts.sum()
    num_votes = torch.einsum("nmk,n->m", votes, counts)
    accuracy = torch.full_like(num_votes, INITIAL_ACCURACY)
    # 1e-12: a labeler that never votes keeps the accuracy it begins with.
    prior_votes = max(prior_votes, 1e-12)
    num_iterations, moved = 0, float("inf")
    while moved > tolerance and num_iterations < max_iterations and len(votes) > 0:
        probabilities = _balanced(_log_likelihood(votes, accuracy), shares, balance)
        num_right = torch.einsum("nmk,nk,n->m", votes, probabilities, counts)
        updated = (num_right + INITIAL_ACCURACY * prior_votes) / (num_votes + prior_votes)
        moved = float((updated - accuracy).abs().max())
        accuracy, num_iterations = updated, num_iterations + 1
    probabilities = balance.repeat(len(weak_labels), 1)
    probabilities[covered] = _balanced(_log_likelihood(votes, accuracy), shares, balance)[pattern_of]
    return LabelModel(accuracy, probabilities, num_iterations)


def hard_labels(probabilities: Tensor, seed: int) -> Tensor:
    """Return the most probable class of each sample, (n,) int64; ties are broken at random, by the seed."""
    order = torch.from_numpy(np.random.default_rng([seed, 3]).random(tuple(probabilities.shape)))
    # 1e-9: sums of the same numbers in another order are equal.
    is_most = probabilities >= probabilities.max(dim=1, keepdim=True).values - 1e-9
    return torch.where(is_most, order, -1.0).argmax(dim=1)


def is_covered(weak_labels: Tensor, abstain: int = ABSTAIN) -> Tensor:
    """Return whether anyone voted on each sample, (n,) bool."""
    return (weak_labels != abstain).any(dim=1)


def _log_likelihood(votes: Tensor, accuracy: Tensor) -> Tensor:
    """Return log p(votes of sample i | y_i = c) but for what all classes share, (n, k)."""
    num_classes = votes.shape[2]
    # 1e-12: an accuracy may be 0 or 1, and its logarithm is to be finite.
    right, wrong = accuracy.clamp(1e-12, 1.0).log(), ((1 - accuracy).clamp(1e-12, 1.0) / (num_classes - 1)).log()
    # What every vote adds if it is wrong, and the difference for the one that is right.
    return (votes.sum(dim=2) @ wrong)[:, None] + torch.einsum("nmk,m->nk", votes, right - wrong)


def _balanced(log_likelihood: Tensor, shares: Tensor, balance: Tensor) -> Tensor:
    """Return q_ic in proportion to `w_c p_ic`, with w such that its mean, weighted by `shares` (n,), is `balance`."""
    log_weight = balance.log()
    for _ in range(NUM_BALANCING_STEPS):
        mean = shares @ (log_likelihood + log_weight).softmax(dim=1)
        log_weight = log_weight + (balance / mean.clamp_min(1e-12)).log()
    return (log_likelihood + log_weight).softmax(dim=1)


def _votes(weak_labels: Tensor, num_classes: int, abstain: int) -> Tensor:
    """Return the votes one-hot, (n, m, k) float64; all 0 for one that abstains."""
    is_vote = weak_labels != abstain
    if bool((is_vote & ((weak_labels < 0) | (weak_labels >= num_classes))).any()):
        raise ConfigError(
            f"Weak labels go from {int(weak_labels.min())} to {int(weak_labels.max())}; expected classes from 0 to "
            f"{num_classes - 1}, or {abstain} for no vote. Correct data.num_classes, or the data."
        )
    return (weak_labels[:, :, None] == torch.arange(num_classes)).to(torch.float64) * is_vote[:, :, None]


# n: texts, m: labelers, t: length in tokens

Labels = Literal["clean", "majority_vote", "label_model"]


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


@dataclass(eq=False)
class AbstractTextData(AbstractData[InMemoryTensors]):
    """Base class of text data, with the common settings; a subclass reads its files and calls `_split`.

    Batches are `{"input": (b, t) int64 token ids, "target": (b,) int64, "index": (b,) int64}`. If the labels of `train`
    are made from votes, its batches also have `"clean_target": (b,) int64` and `"weak_labels": (b, m) int64`.

    Args:
        sizes: number of texts by split name, before a long tail is made and texts without a vote are left out.
        num_classes: must be the number of classes of the data; models refer to it in the configuration.
        vocabulary_size: the most token ids, including padding (0) and unknown (1); models refer to it too.
        length: number of tokens to which texts are cut or padded; models refer to it too.
        labels: labels of `train`. `clean`: the true labels; `majority_vote` or `label_model`: labels made from the
            votes, which leaves out texts without votes. The label model gets the class frequencies from `meta` and
            `val`.
        imbalance_factor: factor between the most common and the rarest class of `train`, by true labels; None: classes
            stay as they are. See `long_tail_counts`.
        tokenizer: folder of a Hugging Face tokenizer; None: the words of `train`.
        seed: seed of the splits and of ties between votes.

    Raises:
        ConfigError: the settings do not fit the data.
    """

    sizes: Mapping[str, Whole]
    num_classes: Count
    vocabulary_size: Count = 10000
    length: Rounds = 64
    labels: Labels = "clean"
    imbalance_factor: ImbalanceFactor | None = field(default=None, kw_only=True)
    tokenizer: str | None = field(default=None, kw_only=True)
    seed: Seed = 0

    def _split(self, parts: Mapping[str, TextPart]) -> None:
        """Draw the splits from a part each, by split name; where several name the same part, draws are disjoint."""
        splits.check_splits(self.sizes, tuple(parts))
        num_classes = int(torch.cat([part.target for part in parts.values()]).max()) + 1
        what = "the number of classes that the data has"
        splits.check_literal("num_classes", self.num_classes, num_classes, what)
        drawn = self._drawn(parts)
        clean_target = None
        if "train" in drawn:
            drawn["train"], clean_target = self._made_weak(drawn["train"], self._class_balance(drawn))
        self.encoder = self._encoder(drawn)
        datasets = {}
        for name, part in drawn.items():
            values = {"input": self.encoder.encode(part.texts, self.length), "target": part.target}
            if name == "train" and clean_target is not None:
                assert part.weak_labels is not None
                values |= {"clean_target": clean_target, "weak_labels": part.weak_labels}
            datasets[name] = InMemoryTensors(values)
        super().__init__(datasets)

    def _drawn(self, parts: Mapping[str, TextPart]) -> dict[str, TextPart]:
        drawn: dict[str, TextPart] = {}
        for part in {id(part): part for part in parts.values()}.values():
            sizes = {name: int(size) for name, size in self.sizes.items() if parts[name] is part}
            for name, indices in splits.split_indices(part.target, sizes, self.seed).items():
                drawn[name] = part.at(indices)
        return {name: drawn[name] for name in self.sizes if name in drawn}

    def _class_balance(self, drawn: Mapping[str, TextPart]) -> Tensor:
        """Return how common the classes are where true labels may be looked at: in `meta` and `val`; else equally."""
        known = [drawn[name].target for name in ("meta", "val") if name in drawn]
        # One more of each: a class that is not there may still exist.
        return 1.0 + torch.bincount(torch.cat([*known, torch.empty(0, dtype=torch.int64)]), minlength=self.num_classes)

    def _made_weak(self, part: TextPart, class_balance: Tensor) -> tuple[TextPart, Tensor | None]:
        """Return the train texts with the labels to train on, and their true ones if those are others."""
        if self.imbalance_factor is not None:
            part = part.at(splits.long_tail_indices(part.target, self.num_classes, self.imbalance_factor))
        if self.labels == "clean":
            return part, None
        votes = torch.zeros(0, 1) - 1 if part.weak_labels is None else part.weak_labels
        expected = "clean, as the texts of train have no votes"
        require(bool(is_covered(votes).any()), "data.labels", self.labels, expected, "Set data.labels=clean.")
        part = part.at(torch.nonzero(is_covered(votes)).squeeze(1))
        assert part.weak_labels is not None
        if self.labels == "majority_vote":
            probabilities = majority_vote(part.weak_labels, self.num_classes)
        else:
            probabilities = label_model(part.weak_labels, self.num_classes, class_balance=class_balance).probabilities
        return TextPart(part.texts, hard_labels(probabilities, self.seed), part.weak_labels), part.target

    def _encoder(self, drawn: Mapping[str, TextPart]) -> "Vocabulary | LocalTokenizer":
        if self.tokenizer is not None:
            return LocalTokenizer(self.tokenizer, self.vocabulary_size)
        texts = drawn["train"].texts if "train" in drawn else [text for part in drawn.values() for text in part.texts]
        return Vocabulary.of(texts, self.vocabulary_size)
