import pytest
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader

from mlotool.data import (
    CropAndFlip,
    Digits,
    InMemoryDataset,
    Normalization,
    corrupt_labels,
    long_tail_counts,
    long_tail_indices,
    split_indices,
)
from mlotool.data.image_data import AugmentedCopies

SIZES = {"train": 1000, "meta": 100, "val": 200, "test": 497}


def test_digits_are_scikit_learns_and_each_is_used_once() -> None:
    data = Digits(SIZES)
    assert data.splits == ("train", "meta", "val", "test")
    assert (data.num_classes, data.image_shape) == (10, (1, 8, 8))
    batches = [data.split(name).__getitems__(range(SIZES[name])) for name in data.splits]
    inputs = torch.cat([batch["input"] for batch in batches]).squeeze(1)
    assert inputs.mean().abs() < 1e-3
    assert (inputs.std() - 1).abs() < 1e-3
    found = ((inputs.double() * 0.3760 + 0.3053) * 16).round()
    assert sorted(found.flatten(1).tolist()) == sorted(torch.from_numpy(load_digits().data).tolist())


def test_only_train_has_the_long_tail() -> None:
    plain, data = Digits(SIZES), Digits(SIZES, imbalance_factor=20)
    expected = long_tail_counts(torch.bincount(plain.split("train").target), 20.0)
    assert torch.equal(torch.bincount(data.split("train").target), expected)
    for name in ("meta", "val", "test"):
        assert torch.equal(data.split(name).target, plain.split(name).target)


def test_only_train_is_corrupted_and_keeps_its_clean_labels() -> None:
    plain, data = Digits(SIZES), Digits(SIZES, label_noise={"kind": "uniform", "rate": 0.4})
    train = data.split("train")
    assert train.clean_target is not None
    assert torch.equal(train.clean_target, plain.split("train").target)
    assert (train.target != train.clean_target).float().mean() == pytest.approx(0.36, abs=0.05)
    assert torch.equal(train[7]["clean_target"], train.clean_target[7])
    for name in ("meta", "val", "test"):
        assert data.split(name).clean_target is None
        assert "clean_target" not in data.split(name)[0]


@pytest.fixture
def dataset() -> InMemoryDataset:
    images = torch.randint(0, 256, (6, 3, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return InMemoryDataset(
        images,
        torch.arange(6),
        Normalization([0.4, 0.5, 0.6], [0.1, 0.2, 0.3]),
        clean_target=torch.arange(6) % 2,
        augmentation=CropAndFlip(padding=2),
    )


@pytest.mark.parametrize("indices", [[4, 1], torch.tensor([4, 1])])
def test_batches_are_collated_and_normalised(dataset: InMemoryDataset, indices: list[int] | torch.Tensor) -> None:
    batch = dataset.without_augmentation().__getitems__(indices)
    assert {name: values.dtype for name, values in batch.items()} == {
        "input": torch.float32,
        "target": torch.int64,
        "index": torch.int64,
        "clean_target": torch.int64,
    }
    assert batch["target"].tolist() == batch["index"].tolist() == [4, 1]
    assert batch["clean_target"].tolist() == [0, 1]
    for channel, (mean, std) in enumerate([(0.4, 0.1), (0.5, 0.2), (0.6, 0.3)]):
        expected = (dataset.images[[4, 1], channel].double() / 255 - mean) / std
        torch.testing.assert_close(batch["input"][:, channel].double(), expected, atol=1e-5, rtol=0)


def test_a_data_loader_takes_the_batches_as_they_are(dataset: InMemoryDataset) -> None:
    loader = DataLoader(dataset, batch_size=4, collate_fn=lambda batch: batch)
    assert [batch["target"].tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5]]


def test_a_seeded_batch_leaves_the_global_generator_alone(dataset: InMemoryDataset) -> None:
    before = torch.get_rng_state()
    dataset.__getitems__([0, 1], seed=3)
    assert torch.equal(before, torch.get_rng_state())


def test_crops_and_flips_are_those_of_the_padded_image() -> None:
    images = torch.arange(1, 2 * 3 * 5 * 4 + 1).reshape(2, 3, 5, 4)
    padded = torch.zeros(2, 3, 9, 8, dtype=images.dtype)
    padded[:, :, 2:7, 2:6] = images
    seen = set()
    for seed in range(200):
        augmented = CropAndFlip(padding=2)(images, torch.Generator().manual_seed(seed))
        for n in range(2):
            matches = [
                (dy, dx, flip)
                for dy in range(5)
                for dx in range(5)
                for flip in (False, True)
                if torch.equal(augmented[n], _crop(padded[n], dy, dx, flip))
            ]
            assert len(matches) == 1
            seen.add(matches[0])
    assert len(seen) == 50  # 400 draws reach each of the 5 x 5 x 2 cases


def test_digits_are_augmented_in_train_alone() -> None:
    sizes = {"train": 30, "val": 10}
    plain, augmented = Digits(sizes), Digits(sizes, augment=True)
    assert augmented.split("train").seeded
    assert not augmented.split("val").seeded
    assert not plain.split("train").seeded
    found = augmented.split("train").__getitems__(range(30), seed=0)["input"]
    assert not torch.equal(found, plain.split("train").__getitems__(range(30))["input"])


def copied_dataset(num_copies: int = 3) -> InMemoryDataset:
    images = torch.randint(0, 256, (6, 1, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    augmentation = AugmentedCopies(CropAndFlip(padding=2), num_copies)
    return InMemoryDataset(images, torch.arange(6), Normalization([0.5], [0.5]), augmentation=augmentation)


def test_a_copy_is_the_same_image_in_every_batch() -> None:
    """As many different images of each sample as there are copies, and all of them come."""
    found: dict[tuple[int, int], torch.Tensor] = {}
    for seed in range(30):
        order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))[:4]
        batch = copied_dataset().__getitems__(order, seed=100 + seed)
        assert batch["index"].tolist() == order.tolist()
        for picture, index, copy in zip(batch["input"], order.tolist(), batch["copy"].tolist(), strict=True):
            assert torch.equal(found.setdefault((index, copy), picture), picture)
    assert set(found) == {(index, copy) for index in range(6) for copy in range(3)}
    assert len({tuple(picture.flatten().tolist()) for picture in found.values()}) == 18


@pytest.fixture
def noisy_target() -> torch.Tensor:
    return torch.arange(20000) % 10


@pytest.mark.parametrize("rate", [0.0, 0.4, 1.0])
def test_uniform_noise_draws_from_all_classes(noisy_target: torch.Tensor, rate: float) -> None:
    noisy = corrupt_labels(noisy_target, 10, kind="uniform", rate=rate, seed=0)
    transitions = torch.bincount(noisy_target * 10 + noisy, minlength=100).reshape(10, 10) / 2000
    expected = rate / 10 * torch.ones(10, 10) + (1 - rate) * torch.eye(10)
    torch.testing.assert_close(transitions, expected, atol=0.04, rtol=0)  # 4 sigma of 2000 draws at p = 0.4


def test_flip_noise_goes_to_one_other_class(noisy_target: torch.Tensor) -> None:
    noisy = corrupt_labels(noisy_target, 10, kind="flip", rate=0.4, seed=0)
    transitions = torch.bincount(noisy_target * 10 + noisy, minlength=100).reshape(10, 10) / 2000
    assert (transitions > 0).sum(dim=1).tolist() == [2] * 10
    torch.testing.assert_close(transitions.diagonal(), torch.full((10,), 0.6), atol=0.045, rtol=0)


SPLIT_SIZES = {"train": 120, "meta": 20, "val": 40}


@pytest.fixture
def split_target() -> torch.Tensor:
    return torch.arange(200) % 4


def test_splits_are_disjoint_and_have_their_sizes(split_target: torch.Tensor) -> None:
    splits = split_indices(split_target, SPLIT_SIZES, seed=0)
    assert {name: len(indices) for name, indices in splits.items()} == SPLIT_SIZES
    assert len(torch.cat(list(splits.values())).unique()) == sum(SPLIT_SIZES.values())


def test_splits_are_stratified_exactly_where_the_classes_are_balanced(split_target: torch.Tensor) -> None:
    for name, indices in split_indices(split_target, SPLIT_SIZES, seed=1).items():
        assert torch.bincount(split_target[indices]).tolist() == [SPLIT_SIZES[name] // 4] * 4


def test_splits_are_stratified_to_one_sample_where_they_are_not() -> None:
    split_target = torch.repeat_interleave(torch.arange(3), torch.tensor([500, 37, 163]))
    for name, indices in split_indices(split_target, {"train": 400, "val": 100, "test": 200}, seed=2).items():
        expected = torch.tensor([500, 37, 163]) * len(indices) / 700
        assert ((torch.bincount(split_target[indices]) - expected).abs() <= 1).all(), name


def test_the_size_of_train_leaves_the_other_splits_alone(split_target: torch.Tensor) -> None:
    small, large = (split_indices(split_target, SPLIT_SIZES | {"train": size}, seed=0) for size in (10, 140))
    assert torch.equal(small["meta"], large["meta"])
    assert torch.equal(small["val"], large["val"])
    assert torch.equal(small["train"], large["train"][:10])


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


def test_long_tail_of_unequal_classes_asks_for_no_more_than_there_is() -> None:
    available = torch.tensor([100, 40, 100])
    counts = long_tail_counts(available, 4.0)
    assert counts.tolist() == [80, 40, 20]


def test_long_tail_indices_keep_the_first_of_each_class() -> None:
    split_target = torch.tensor([1, 0, 0, 1, 0, 0, 1, 1])
    assert long_tail_indices(split_target, 2, 4.0).tolist() == [0, 1, 2, 4, 5]


def _crop(image: torch.Tensor, dy: int, dx: int, flip: bool) -> torch.Tensor:
    crop = image[:, dy : dy + 5, dx : dx + 4]
    return crop.flip(-1) if flip else crop
