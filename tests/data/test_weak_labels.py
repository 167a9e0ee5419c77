"""Votes to labels, against brute force on tiny cases and against planted accuracies."""

from itertools import product

import pytest
import torch
from torch import Tensor

from mlotool.core.errors import ConfigError
from mlotool.data import hard_labels, label_model, majority_vote


def plant(accuracy: list[float], coverage: float, num_samples: int, num_classes: int) -> tuple[Tensor, Tensor]:
    """Return votes (n, m) of labelers with these accuracies, and the labels."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(num_classes, (num_samples,), generator=generator)
    shape = (num_samples, len(accuracy))
    is_right = torch.rand(shape, generator=generator) < torch.tensor(accuracy)
    wrong = (target[:, None] + torch.randint(1, num_classes, shape, generator=generator)) % num_classes
    votes = torch.where(is_right, target[:, None], wrong)
    return torch.where(torch.rand(shape, generator=generator) < coverage, votes, -1), target


def test_majority_vote_counts() -> None:
    votes = torch.tensor([[2, 2, 0], [0, 1, -1], [-1, -1, -1], [-1, 1, -1], [0, 1, 2]])
    third = [1 / 3] * 3
    expected = [[0, 0, 1], [0.5, 0.5, 0], third, [0, 1, 0], third]
    torch.testing.assert_close(majority_vote(votes, 3), torch.tensor(expected, dtype=torch.float64))


def test_another_value_may_mean_no_vote() -> None:
    votes = torch.tensor([[1, 9], [9, 9]])
    assert majority_vote(votes, 2, abstain=9).tolist() == [[0, 1], [0.5, 0.5]]
    assert label_model(votes, 2, abstain=9).probabilities[1].tolist() == [0.5, 0.5]


@pytest.mark.parametrize("vote", [majority_vote, label_model])
def test_votes_for_no_class_are_refused(vote: type) -> None:
    with pytest.raises(ConfigError, match=r"Weak labels go from -1 to 2; expected classes from 0 to 1"):
        vote(torch.tensor([[2, -1]]), 2)


def test_hard_labels_break_ties_by_the_seed() -> None:
    probabilities = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.1, 0.7]]).repeat(2000, 1)
    labels = hard_labels(probabilities, seed=0)
    assert (labels[1::2] == 2).all()
    assert labels[::2].float().mean() == pytest.approx(0.5, abs=0.05)
    assert set(labels[::2].tolist()) == {0, 1}
    assert torch.equal(labels, hard_labels(probabilities, seed=0))
    assert not torch.equal(labels, hard_labels(probabilities, seed=1))


def joint(row: list[int], label: int, accuracy: Tensor, num_classes: int) -> Tensor:
    """Return p(votes that are given | label), by its definition."""
    factors = [
        a if vote == label else (1 - a) / (num_classes - 1) for vote, a in zip(row, accuracy, strict=True) if vote >= 0
    ]
    return torch.stack(factors).prod()


@pytest.mark.parametrize("num_classes", [2, 3])
def test_the_label_model_is_at_its_fixed_point(num_classes: int) -> None:
    votes, _ = plant([0.9, 0.7, 0.6], 0.7, 60, num_classes)
    balance = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)[:num_classes]
    model = label_model(
        votes, num_classes, class_balance=balance, prior_votes=5.0, max_iterations=5000, tolerance=1e-12
    )
    covered = (votes >= 0).any(dim=1)
    found = model.probabilities[covered]
    balance = balance / balance.sum()
    # The mean is the balance; what remains of each row is the likelihood, up to one weight a class.
    torch.testing.assert_close(found.mean(dim=0), balance, atol=1e-9, rtol=0)
    likelihood = [
        [joint(row, c, model.accuracy, num_classes) for c in range(num_classes)] for row in votes[covered].tolist()
    ]
    ratio = found / torch.tensor(likelihood)
    ratio = ratio / ratio[:, :1]
    torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio))
    assert torch.equal(model.probabilities[~covered], balance.expand(int((~covered).sum()), -1))
    for labeler in range(3):
        does_vote = votes[:, labeler] >= 0
        right = model.probabilities[does_vote, votes[does_vote, labeler]].sum()
        expected = (right + 0.7 * 5) / (does_vote.sum() + 5)
        torch.testing.assert_close(model.accuracy[labeler], expected)


def test_without_a_prior_it_is_maximum_likelihood() -> None:
    # Each row has its mirror image, so the classes are equally common whatever the accuracies are.
    rows = [
        row
        for row, count in zip(product([0, 1], repeat=3), [9, 3, 3, 2, 2, 3, 3, 9], strict=True)
        for _ in range(count)
    ]
    votes = torch.tensor(rows)
    model = label_model(votes, 2, prior_votes=0.0, max_iterations=10000, tolerance=1e-13)
    accuracy = model.accuracy.clone().requires_grad_()
    likelihood = sum((0.5 * (joint(row, 0, accuracy, 2) + joint(row, 1, accuracy, 2))).log() for row in votes.tolist())
    (gradient,) = torch.autograd.grad(likelihood, accuracy)
    torch.testing.assert_close(gradient, torch.zeros(3, dtype=torch.float64), atol=1e-5, rtol=0)
    # In closed form, of three labelers: E[l_1 l_2] = (2 a_1 - 1)(2 a_2 - 1), and so on.
    signs = 2.0 * votes.double() - 1
    m12, m13, m23 = ((signs[:, i] * signs[:, j]).mean() for i, j in ((0, 1), (0, 2), (1, 2)))
    expected = 0.5 + 0.5 * torch.stack([(m12 * m13 / m23).sqrt(), (m12 * m23 / m13).sqrt(), (m13 * m23 / m12).sqrt()])
    torch.testing.assert_close(model.accuracy, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("num_classes", [2, 4])
def test_planted_accuracies_are_recovered(num_classes: int) -> None:
    planted = [0.95, 0.8, 0.7, 0.6, 0.6]
    votes, target = plant(planted, 0.8, 4000, num_classes)
    model = label_model(votes, num_classes)
    torch.testing.assert_close(model.accuracy, torch.tensor(planted).double(), atol=0.04, rtol=0)
    by_model = (hard_labels(model.probabilities, 0) == target).float().mean()
    by_majority = (hard_labels(majority_vote(votes, num_classes), 0) == target).float().mean()
    assert by_model > by_majority + 0.02


def test_rules_for_one_class_each_do_not_all_become_right_or_wrong() -> None:
    votes, target = plant([0.9, 0.8, 0.9, 0.8], 0.7, 4000, 2)
    for labeler in range(4):
        votes[votes[:, labeler] != labeler % 2, labeler] = -1
    model = label_model(votes, 2)
    assert model.accuracy.min() > 0.6
    covered = (votes >= 0).any(dim=1)
    assert (hard_labels(model.probabilities, 0) == target)[covered].float().mean() > 0.8


def test_a_labeler_that_never_votes_changes_nothing() -> None:
    votes, _ = plant([0.9, 0.7, 0.6], 0.8, 200, 2)
    silent = torch.cat([votes, torch.full((200, 1), -1)], dim=1)
    torch.testing.assert_close(label_model(silent, 2).probabilities, label_model(votes, 2).probabilities)
    nobody = label_model(torch.full((3, 2), -1), 2)
    assert nobody.probabilities.tolist() == [[0.5, 0.5]] * 3
