"""The same images again, whatever they come with."""

import pytest
import torch

from mlotool.core.errors import ConfigError
from mlotool.data import CropAndFlip, InMemoryDataset, Normalization
from mlotool.data.image_data import AugmentedCopies


def dataset(num_copies: int = 3) -> InMemoryDataset:
    images = torch.randint(0, 256, (6, 1, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    augmentation = AugmentedCopies(CropAndFlip(padding=2), num_copies)
    return InMemoryDataset(images, torch.arange(6), Normalization([0.5], [0.5]), augmentation=augmentation)


def test_a_copy_is_the_same_image_in_every_batch() -> None:
    """As many different images of each sample as there are copies, and all of them come."""
    found: dict[tuple[int, int], torch.Tensor] = {}
    for seed in range(30):
        order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))[:4]
        batch = dataset().__getitems__(order, seed=100 + seed)
        assert batch["index"].tolist() == order.tolist()
        for picture, index, copy in zip(batch["input"], order.tolist(), batch["copy"].tolist(), strict=True):
            assert torch.equal(found.setdefault((index, copy), picture), picture)
    assert set(found) == {(index, copy) for index in range(6) for copy in range(3)}
    assert len({tuple(picture.flatten().tolist()) for picture in found.values()}) == 18


def test_the_seed_decides_which_copies_come() -> None:
    copies = [dataset(50).__getitems__(range(6), seed=seed)["copy"].tolist() for seed in (1, 1, 2)]
    assert copies[0] == copies[1] != copies[2]
    assert dataset().seeded
    assert "copy" not in dataset().without_augmentation().__getitems__(range(6))


@pytest.mark.parametrize(("augment", "kind"), [(True, CropAndFlip), (False, type(None)), (4, AugmentedCopies)])
def test_what_a_setting_means(augment, kind) -> None:
    assert type(AugmentedCopies.of(CropAndFlip(), augment)) is kind


def test_no_copies_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.augment: found 0"):
        AugmentedCopies.of(CropAndFlip(), 0)
