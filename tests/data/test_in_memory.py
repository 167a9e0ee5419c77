import pytest
import torch
from torch.utils.data import DataLoader

from mlotool.data import CropAndFlip, Digits, InMemoryDataset, Normalization


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


def test_one_sample_has_no_batch_axis(dataset: InMemoryDataset) -> None:
    plain = dataset.without_augmentation()
    sample = plain[3]
    assert sample["input"].shape == (3, 8, 8)
    assert sample["index"].shape == ()
    assert len(list(plain)) == len(plain) == 6  # iteration ends: IndexError past the last one


def test_a_data_loader_takes_the_batches_as_they_are(dataset: InMemoryDataset) -> None:
    loader = DataLoader(dataset, batch_size=4, collate_fn=lambda batch: batch)
    assert [batch["target"].tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5]]


def test_the_seed_decides_the_augmentation(dataset: InMemoryDataset) -> None:
    indices = list(range(6))
    first, again, other = (dataset.__getitems__(indices, seed=seed)["input"] for seed in (1, 1, 2))
    assert dataset.seeded
    assert not dataset.without_augmentation().seeded
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_without_a_seed_the_global_generator_is_used(dataset: InMemoryDataset) -> None:
    torch.manual_seed(5)
    first = dataset.__getitems__([0, 1, 2])["input"]
    torch.manual_seed(5)
    assert torch.equal(first, dataset.__getitems__([0, 1, 2])["input"])


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


def _crop(image: torch.Tensor, dy: int, dx: int, flip: bool) -> torch.Tensor:
    crop = image[:, dy : dy + 5, dx : dx + 4]
    return crop.flip(-1) if flip else crop


def test_crops_without_flips() -> None:
    images = torch.arange(1, 2 * 3 * 5 * 4 + 1).reshape(2, 3, 5, 4)
    padded = torch.zeros(2, 3, 7, 6, dtype=images.dtype)
    padded[:, :, 1:6, 1:5] = images
    seen = set()
    for seed in range(60):
        augmented = CropAndFlip(padding=1, flip=False)(images, torch.Generator().manual_seed(seed))
        for n in range(2):
            places = [(dy, dx) for dy in range(3) for dx in range(3)]
            seen |= {(dy, dx) for dy, dx in places if torch.equal(augmented[n], padded[n, :, dy : dy + 5, dx : dx + 4])}
    assert len(seen) == 9


def test_digits_are_augmented_in_train_alone() -> None:
    sizes = {"train": 30, "val": 10}
    plain, augmented = Digits(sizes), Digits(sizes, augment=True)
    assert augmented.split("train").seeded
    assert not augmented.split("val").seeded
    assert not plain.split("train").seeded
    found = augmented.split("train").__getitems__(range(30), seed=0)["input"]
    assert not torch.equal(found, plain.split("train").__getitems__(range(30))["input"])
