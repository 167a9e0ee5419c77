import pytest
import torch

from mlotool.core.errors import ConfigError
from mlotool.data import long_tail_counts, long_tail_indices, split_indices

SIZES = {"train": 120, "meta": 20, "val": 40}


@pytest.fixture
def target() -> torch.Tensor:
    return torch.arange(200) % 4


def test_splits_are_disjoint_and_have_their_sizes(target: torch.Tensor) -> None:
    splits = split_indices(target, SIZES, seed=0)
    assert {name: len(indices) for name, indices in splits.items()} == SIZES
    assert len(torch.cat(list(splits.values())).unique()) == sum(SIZES.values())


def test_splits_are_stratified_exactly_where_the_classes_are_balanced(target: torch.Tensor) -> None:
    for name, indices in split_indices(target, SIZES, seed=1).items():
        assert torch.bincount(target[indices]).tolist() == [SIZES[name] // 4] * 4


def test_splits_are_stratified_to_one_sample_where_they_are_not() -> None:
    target = torch.repeat_interleave(torch.arange(3), torch.tensor([500, 37, 163]))
    for name, indices in split_indices(target, {"train": 400, "val": 100, "test": 200}, seed=2).items():
        expected = torch.tensor([500, 37, 163]) * len(indices) / 700
        assert ((torch.bincount(target[indices]) - expected).abs() <= 1).all(), name


def test_the_seed_decides(target: torch.Tensor) -> None:
    first, again, other = (split_indices(target, SIZES, seed)["train"] for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first.sort().values, other.sort().values)


def test_the_size_of_train_leaves_the_other_splits_alone(target: torch.Tensor) -> None:
    small, large = (split_indices(target, SIZES | {"train": size}, seed=0) for size in (10, 140))
    assert torch.equal(small["meta"], large["meta"])
    assert torch.equal(small["val"], large["val"])
    assert torch.equal(small["train"], large["train"][:10])


def test_a_split_of_size_zero_is_left_out(target: torch.Tensor) -> None:
    assert set(split_indices(target, {"train": 5, "val": 0}, seed=0)) == {"train"}


@pytest.mark.parametrize("sizes", [{"train": 150, "val": 51}, {"train": -1}])
def test_impossible_sizes_are_refused(target: torch.Tensor, sizes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"data\.sizes asks for .* at most 200.* Lower data\.sizes\.train"):
        split_indices(target, sizes, seed=0)


@pytest.mark.parametrize(("imbalance_factor", "rarest"), [(10.0, 500), (50.0, 100), (100.0, 50), (200.0, 25)])
def test_long_tail_counts_are_the_formula(imbalance_factor: float, rarest: int) -> None:
    counts = long_tail_counts(torch.full((10,), 5000), imbalance_factor).tolist()
    assert counts[0] == 5000
    assert counts[-1] == rarest
    assert counts[1:-1] == [int(5000 * imbalance_factor ** (-c / 9)) for c in range(1, 9)]


def test_long_tail_of_cifar10_is_the_published_one() -> None:
    # Cui et al. 2019 and those after them: 12,406 images at imbalance factor 100.
    counts = long_tail_counts(torch.full((10,), 5000), 100.0)
    assert counts.tolist() == [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50]
    assert counts.sum() == 12406


def test_long_tail_counts_that_are_whole_stay_whole_in_floating_point() -> None:
    assert long_tail_counts(torch.full((11,), 1024), 1024.0).tolist() == [2**power for power in range(10, -1, -1)]


def test_long_tail_of_unequal_classes_asks_for_no_more_than_there_is() -> None:
    available = torch.tensor([100, 40, 100])
    counts = long_tail_counts(available, 4.0)
    assert counts.tolist() == [80, 40, 20]


def test_long_tail_indices_keep_the_first_of_each_class() -> None:
    target = torch.tensor([1, 0, 0, 1, 0, 0, 1, 1])
    assert long_tail_indices(target, 2, 4.0).tolist() == [0, 1, 2, 4, 5]


def test_an_imbalance_factor_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"imbalance_factor: found 0\.01; expected a number of at least 1"):
        long_tail_counts(torch.tensor([10, 10]), 0.01)
