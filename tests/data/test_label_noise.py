from typing import Any

import pytest
import torch

from mlotool.core.errors import ConfigError
from mlotool.data import Digits, corrupt_labels


@pytest.fixture
def target() -> torch.Tensor:
    return torch.arange(20000) % 10


@pytest.mark.parametrize("rate", [0.0, 0.4, 1.0])
def test_uniform_noise_draws_from_all_classes(target: torch.Tensor, rate: float) -> None:
    noisy = corrupt_labels(target, 10, kind="uniform", rate=rate, seed=0)
    transitions = torch.bincount(target * 10 + noisy, minlength=100).reshape(10, 10) / 2000
    expected = rate / 10 * torch.ones(10, 10) + (1 - rate) * torch.eye(10)
    torch.testing.assert_close(transitions, expected, atol=0.04, rtol=0)  # 4 sigma of 2000 draws at p = 0.4


def test_flip_noise_goes_to_one_other_class(target: torch.Tensor) -> None:
    noisy = corrupt_labels(target, 10, kind="flip", rate=0.4, seed=0)
    transitions = torch.bincount(target * 10 + noisy, minlength=100).reshape(10, 10) / 2000
    assert (transitions > 0).sum(dim=1).tolist() == [2] * 10
    torch.testing.assert_close(transitions.diagonal(), torch.full((10,), 0.6), atol=0.045, rtol=0)


def test_the_seed_decides_and_the_clean_labels_stay(target: torch.Tensor) -> None:
    before = target.clone()
    first, again, other = (corrupt_labels(target, 10, kind="uniform", rate=0.4, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(target, before)


@pytest.mark.parametrize(
    ("label_noise", "message"),
    [
        (
            {"kind": "unifrom", "rate": 0.4},
            r"kind: found 'unifrom'; expected one of uniform, flip\. Did you mean 'uniform'",
        ),
        ({"kind": "flip", "rate": 40}, r"rate: found 40; expected a number of at least 0 and at most 1"),
        ({"kind": "flip", "ratio": 0.4}, r"label_noise: found {kind: 'flip', ratio: 0.4}"),
        ({"kind": "flip"}, r"label_noise: found {kind: 'flip'}"),
    ],
)
def test_faults_are_refused(label_noise: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Digits({"train": 10}, label_noise=label_noise)
